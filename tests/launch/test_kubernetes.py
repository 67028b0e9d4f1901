"""The manifests in launch/kubernetes/: valid by the operators' definitions, and commands that this repository has.

Nothing here asks a cluster; what admission webhooks and CEL rules would say is not known.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from conf.cli import compose_config, require_plan
from tests.engine.launched import ROOT
from tests.launch.crds import strict

MANIFESTS = ROOT / "launch" / "kubernetes"
SCHEMAS = Path(__file__).with_name("schemas")


def documents() -> list[tuple[str, dict[str, Any]]]:
    """(file name, document) of every manifest."""
    return [
        (path.name, one) for path in sorted(MANIFESTS.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text())
    ]


def document(kind: str) -> dict[str, Any]:
    (found,) = [one for _, one in documents() if one["kind"] == kind]
    return copy.deepcopy(found)


def validator(kind: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{kind.lower()}.json").read_text()))


KINDS = ("PyTorchJob", "TrainJob", "TrainingRuntime")


def test_every_document_has_a_schema():
    assert sorted(one["kind"] for _, one in documents()) == sorted(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_is_valid(kind):
    problems = [f"{error.json_path}: {error.message}" for error in validator(kind).iter_errors(document(kind))]
    assert problems == []


def worker(one: dict[str, Any]) -> dict[str, Any]:
    return one["spec"]["pytorchReplicaSpecs"]["Worker"]


def pod(kind: str, one: dict[str, Any]) -> dict[str, Any]:
    """The pod's specification in a manifest that has one."""
    if kind == "PyTorchJob":
        return worker(one)["template"]["spec"]
    return one["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("kind", "spoil", "word"),
    [
        ("PyTorchJob", lambda one: worker(one).update(restartPolicies="Never"), "restartPolicies"),
        ("PyTorchJob", lambda one: one["spec"]["elasticPolicy"].update(rdzvbackend="c10d"), "rdzvbackend"),
        ("PyTorchJob", lambda one: pod("PyTorchJob", one)["containers"][0].update(comand=[]), "comand"),
        ("PyTorchJob", lambda one: pod("PyTorchJob", one)["volumes"][1]["emptyDir"].update(size="1"), "size"),
        ("PyTorchJob", lambda one: one["spec"].pop("pytorchReplicaSpecs"), "pytorchReplicaSpecs"),
        ("PyTorchJob", lambda one: one["spec"].update(nprocPerNode=8), "8 is not of type 'string'"),
        ("PyTorchJob", lambda one: one.update(apiVersion="kubeflow.org/v2"), "kubeflow.org/v1"),
        ("TrainJob", lambda one: one["spec"]["trainer"].update(numNode=2), "numNode"),
        ("TrainJob", lambda one: one["spec"]["trainer"].update(numProcPerNode="8"), "integer"),
        ("TrainJob", lambda one: one["spec"]["runtimeRef"].pop("name"), "name"),
        ("TrainJob", lambda one: one["spec"]["trainer"]["resourcesPerNode"]["limits"].update(cpu="8 cores"), "8 cores"),
        ("TrainingRuntime", lambda one: one["spec"]["mlPolicy"].update(pytorch={}), "pytorch"),
        ("TrainingRuntime", lambda one: pod("TrainingRuntime", one)["containers"][0].update(envs=[]), "envs"),
    ],
)
def test_a_misspelt_or_lacking_field_is_refused(kind, spoil, word):
    spoilt = document(kind)
    spoil(spoilt)
    problems = [error.message for error in validator(kind).iter_errors(spoilt)]
    assert len(problems) == 1 and word in problems[0]


def test_a_field_that_a_definition_leaves_open_takes_anything_and_others_nothing():
    definition = {
        "type": "object",
        "properties": {"a": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
    }
    check = jsonschema.Draft202012Validator(strict(definition))
    assert check.is_valid({"a": {"b": 1}}) and not check.is_valid({"b": 1})


def command(kind: str) -> tuple[list[str], int]:
    """What a node runs, and the number of ranks in all."""
    one = document(kind)
    if kind == "PyTorchJob":
        container = pod(kind, one)["containers"][0]
        return [*container["command"], *container["args"]], worker(one)["replicas"] * int(one["spec"]["nprocPerNode"])
    trainer = one["spec"]["trainer"]
    return [*trainer["command"], *trainer["args"]], trainer["numNodes"] * trainer["numProcPerNode"]


@pytest.mark.parametrize("kind", ["PyTorchJob", "TrainJob"])
def test_the_command_is_a_run_of_this_repository_that_fits_the_nodes_and_resumes_by_its_id(kind):
    words, ranks = command(kind)
    python, launcher, recipe, *overrides = words
    assert python == "python" and all(
        (ROOT / Path(word).relative_to("/opt/recipes")).is_file() for word in (launcher, recipe)
    )
    config = compose_config(overrides)
    require_plan(config, world_size=ranks, device="cuda")
    assert config.run.id is not None and config.resume == "auto"


@pytest.mark.parametrize("kind", ["PyTorchJob", "TrainingRuntime"])
def test_a_pod_saves_before_it_is_killed_keeps_runs_on_a_claim_and_no_secret_in_the_manifest(kind):
    spec = pod(kind, document(kind))
    (container,) = spec["containers"]
    variables = {one["name"]: one for one in container["env"]}
    assert int(variables["PET_SHUTDOWN_TIMEOUT"]["value"]) < spec["terminationGracePeriodSeconds"]
    assert "value" not in variables["WANDB_API_KEY"] and "secretKeyRef" in variables["WANDB_API_KEY"]["valueFrom"]
    places = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    volumes = {places[one["name"]]: one for one in spec["volumes"]}
    assert "persistentVolumeClaim" in volumes[container["workingDir"]]
    assert volumes["/dev/shm"]["emptyDir"]["medium"] == "Memory"


def test_what_was_refused_or_stopped_by_an_alert_is_not_started_again():
    from launch.elastic import FINAL

    rules = document("TrainingRuntime")["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    (final,) = [one for one in rules["podFailurePolicy"]["rules"] if one["action"] == "FailJob"]
    assert tuple(final["onExitCodes"]["values"]) == FINAL[1:]
    job = document("PyTorchJob")
    (retry,) = [one["value"] for one in pod("PyTorchJob", job)["containers"][0]["env"] if one["name"] == "RETRY_CODE"]
    assert worker(job)["restartPolicy"] == "ExitCode" and int(retry) > 127 > max(FINAL)  # the operator's bound
    assert job["spec"]["elasticPolicy"]["maxRestarts"] == 0


def test_what_keeps_failing_is_started_again_a_number_of_times_only():
    job = document("PyTorchJob")
    variables = {one["name"]: one.get("value") for one in pod("PyTorchJob", job)["containers"][0]["env"]}
    assert int(variables["RETRY_LIMIT"]) > 1
    # Under ExitCode the operator (v1.9.0) does not count, whatever is written there.
    assert worker(job)["restartPolicy"] == "ExitCode" and "backoffLimit" not in job["spec"]["runPolicy"]
    assert document("TrainingRuntime")["spec"]["template"]["spec"]["failurePolicy"]["maxRestarts"] > 0
