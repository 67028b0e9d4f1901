"""A plan as a versioned profile: conf/parallel/NAME.yaml, and beside it the record records/NAME.json.

The YAML holds what splits a model (degrees, axis order, schedule, split, recomputation); the record holds what was
predicted of it, by which planner, and what was observed since. A profile is known by name, version and the hash of what
its YAML determines. The format is here, and reading and writing it; what an observation must show is
`parallel.promotion`, what is measured comes from `engine`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from conf.schema import Config, ParallelConfig
from parallel.communication import Collective, ledger
from parallel.ledger import Ledger
from parallel.memory import predict
from parallel.plan import ParallelPlan
from parallel.prediction import PLANNER_VERSION, Prediction

PREDICTED_ONLY = "predicted only"
LABELS = ("name", "version")  # of a profile: they split nothing
YAML_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")


@dataclass(frozen=True)
class Profile:
    """Which profile a run is split by; the hash tells it from one whose knobs were changed on the command line."""

    name: str
    version: int
    hash: str

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Profile:
        return cls(parallel.name, parallel.version, profile_hash(parallel))


def determined(parallel: ParallelConfig) -> dict[str, Any]:
    """The knobs that differ from the schema's defaults, so that a knob added later changes no profile."""
    defaults = plain(ParallelConfig())
    return {k: v for k, v in plain(parallel).items() if k not in LABELS and v != defaults[k]}


def profile_hash(parallel: ParallelConfig) -> str:
    """sha256 of what the YAML determines: its values, not its comments nor its labels."""
    return sha256(json.dumps(determined(parallel), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def plain(value: Any) -> Any:
    """A dataclass as JSON has it."""
    return json.loads(json.dumps(asdict(value)))


def software() -> dict[str, str]:
    """Versions that decide what a plan costs here; a package that is not installed is left out."""
    found = {"python": platform.python_version()}
    for package in ("torch", "deepspeed"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def conditions(config: Config, *, world_size: int) -> dict[str, Any]:
    """What a prediction or an observation holds for, beside device and software: model, cluster, batch, formats."""
    cluster = config.cluster
    return {
        "model": plain(config.model),
        "cluster": {
            "name": cluster.name, "nodes": cluster.nodes, "devices_per_node": cluster.devices_per_node,
            "memory_per_device": cluster.memory_per_device, "ranks": world_size,
        },
        "batch": {
            "micro_batch_size": config.train.micro_batch_size, "global_batch_size": config.train.global_batch_size,
            "sequence_length": config.data.sequence_length, "mask_documents": config.data.mask_documents,
        },
        "precision": {
            "dtype": config.precision.dtype.value, "grad_accum_dtype": config.precision.grad_accum_dtype.value
        },
        "zero": plain(config.zero),
    }  # fmt: skip


def memory_ledgers(ledgers: Sequence[Ledger]) -> list[dict[str, Any]]:
    """Bytes of each pipeline rank, by category and in total."""
    return [
        plain(one)
        | {"kinds": one.kinds._asdict(), "states": one.states, "activations": round(one.activations)}
        | {"tensors": round(one.tensors), "total": round(one.total)}
        for one in ledgers
    ]


def communication(config: Config, plan: ParallelPlan, whole: Prediction | None) -> list[dict[str, dict[str, Any]]]:
    """Of each pipeline rank and step, by axis: bytes, calls and, where links are known, seconds, hidden or not."""
    priced: list[list[tuple[Collective, float | None]]]
    if whole is None:
        priced = [
            [(one, None) for one in ledger(config, plan, pp_rank)]
            for pp_rank in range(plan.pipeline_model_parallel_size)
        ]
    else:
        priced = [[(one.collective, one.seconds) for one in calls] for calls in whole.collectives]
    return [_by_axis(calls) for calls in priced]


def _by_axis(priced: Sequence[tuple[Collective, float | None]]) -> dict[str, dict[str, Any]]:
    axes: dict[str, dict[str, Any]] = {}
    for collective, seconds in priced:
        axis = axes.setdefault(collective.axis, {"bytes": 0, "calls": 0, "seconds": None})
        axis["bytes"] += collective.total_bytes
        axis["calls"] += collective.calls
        if seconds is not None:
            axis["seconds"] = (axis["seconds"] or 0.0) + seconds
    return axes


def predicted(config: Config, plan: ParallelPlan, prediction: Prediction | None, *, device: str) -> dict[str, Any]:
    """What a record keeps of a prediction; without one (a cluster that nobody measured) bytes alone."""
    ledgers = predict(config, plan, device=device) if prediction is None else prediction.ledgers
    found: dict[str, Any] = {
        "device": device,
        "memory": memory_ledgers(ledgers),
        "communication": communication(config, plan, prediction),
    }
    names = ("step_s", "bubble", "imbalance", "tokens_per_s", "tokens_per_s_per_device", "mfu", "hfu", "seconds")
    times = {name: None if prediction is None else getattr(prediction, name) for name in names}
    return found | {name: list(value) if isinstance(value, tuple) else value for name, value in times.items()}


def new_record(
    config: Config, plan: ParallelPlan, prediction: Prediction | None, *, device: str, git_commit: str | None
) -> dict[str, Any]:
    """The record of `config.parallel` as it stands: predicted, not observed."""
    return {
        "profile": plain(Profile.of(config.parallel)) | {"determined": determined(config.parallel)},
        "status": PREDICTED_ONLY,
        "planner": {
            "version": PLANNER_VERSION,
            "git_commit": git_commit,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "software": software(),
        },
        "conditions": conditions(config, world_size=plan.world_size),
        "predicted": predicted(config, plan, prediction, device=device),
        "replaces": None,
        "observations": [],
    }


def write_profile(
    name: str,
    config: Config,
    prediction: Prediction | ParallelPlan,
    folder: Path,
    *,
    overwrite: bool = False,
    device: str = "cuda",
    git_commit: str | None = None,
    about: str = "",
) -> Path:
    """Write folder/NAME.yaml and its record; the YAML's path.

    prediction: a plan alone where the cluster has no measured links and rates: the record then has bytes and no
    seconds. An existing name is written again, as the next version, only where `overwrite` says so; the observations
    under the version before stay in the new record as what it replaces. Raises ValueError for a name that cannot be.
    """
    if not re.fullmatch(r"[A-Za-z0-9]\w*", name):
        raise ValueError(f"profile name {name!r} is not a file's name; use letters, digits and _")
    path, before = folder / f"{name}.yaml", read_record(name, folder)
    if (path.exists() or before) and not overwrite:
        held = f"version {before['profile']['version']}" if before else "without a record"
        raise ValueError(
            f"{path} exists ({held}); ask to overwrite it, which makes the next version, or use another name"
        )
    plan, whole = (prediction, None) if isinstance(prediction, ParallelPlan) else (prediction.plan, prediction)
    parallel = replace(
        config.parallel,
        name=name,
        version=1 + before["profile"]["version"] if before else 1,
        stages=blocks_per_stage(config, plan) if plan.pipeline_model_parallel_size > 1 else None,
    )
    pinned = replace(config, parallel=parallel)
    record = new_record(pinned, plan, whole, device=device, git_commit=git_commit)
    if before:
        record["replaces"] = {"profile": before["profile"], "observations": before["observations"]}
    comment = about or f"{config.model.name} on {plan.world_size} devices of {config.cluster.name}."
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(profile_yaml(parallel, comment=f"{comment} Standing: see records/{name}.json."))
    write_record(name, folder, record)
    return path


def blocks_per_stage(config: Config, plan: ParallelPlan) -> list[int]:
    """The plan's split as parallel.stages takes it: blocks of each (virtual) stage, in order."""
    last = config.model.num_layers + 1
    return [min(end, last) - max(first, 1) for first, end in plan.stage_layers]


def profile_yaml(parallel: ParallelConfig, *, comment: str) -> str:
    lines = [f"# {comment}"]
    return "\n".join([*lines, *(f"{key}: {_yaml(value)}" for key, value in plain(parallel).items())]) + "\n"


def _yaml(value: Any) -> str:
    """JSON, which YAML reads; words without quotes."""
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z]\w*", value) and value.lower() not in YAML_WORDS:
        return value
    return json.dumps(value)


def record_path(name: str, folder: Path) -> Path:
    return folder / "records" / f"{name}.json"


def read_record(name: str, folder: Path) -> dict[str, Any] | None:
    """None where there is none. Raises ValueError where it is no record."""
    path = record_path(name, folder)
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text())
        if not {"profile", "conditions", "predicted", "observations"} <= set(record):
            raise ValueError("a part of it is missing")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a profile's record ({error}); write it again with recipes/plan.py") from None
    return record


def write_record(name: str, folder: Path, record: Mapping[str, Any]) -> None:
    """Through a temporary name, so that a reader never sees half a record."""
    path = record_path(name, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(record, indent=2) + "\n")
    os.replace(temporary, path)
