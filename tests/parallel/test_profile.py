"""Profiles: what is written composes to the same plan, versions and hashes tell them apart, records can be predicted
again.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from conf.cli import compose_config
from conf.knobs import CONF, options
from conf.schema import Config, ParallelConfig, Recompute, Schedule
from parallel.plan import ParallelPlan
from parallel.prediction import PLANNER_VERSION, predict_run
from parallel.profile import (
    PREDICTED_ONLY,
    Profile,
    profile_hash,
    read_record,
    renewed,
    write_profile,
    write_record,
)
from parallel.record import conditions, config_of
from tests.parallel.configs import measured_cluster, tiny

PROFILES = CONF / "parallel"


def plan_of(config: Config) -> ParallelPlan:
    return ParallelPlan.from_config(config, config.parallel.tp * config.parallel.pp, device="cpu")


def test_a_written_profile_composes_to_the_knobs_it_was_written_from_with_its_split_pinned(tmp_path):
    config = tiny(parallel__tp=2, parallel__pp=2, parallel__schedule="eager1f1b", parallel__recompute="full")
    config.parallel.sequence_parallel, config.parallel.recompute_interval = True, 2
    plan = plan_of(config)
    write_profile("mine", config, plan, tmp_path / "parallel", device="cpu")
    composed = compose_config(["parallel=mine"], config_dir=str(tmp_path)).parallel
    assert composed.stages == plan.blocks_per_stage and sum(composed.stages) == config.model.num_layers
    assert composed == replace(config.parallel, name="mine", version=1, stages=composed.stages)
    record = read_record("mine", tmp_path / "parallel")
    assert record["profile"]["hash"] == profile_hash(composed) and record["status"] == PREDICTED_ONLY
    assert record["observations"] == [] and record["planner"]["version"] == PLANNER_VERSION


def test_the_pinned_split_of_the_v_schedule_is_one_number_a_virtual_stage(tmp_path):
    config = tiny(parallel__pp=2, parallel__schedule="dualpipev", train__global_batch_size=8)
    write_profile("v", config, plan_of(config), tmp_path / "parallel", device="cpu")
    composed = compose_config(["parallel=v"], config_dir=str(tmp_path)).parallel
    assert len(composed.stages) == 4
    assert plan_of(replace(config, parallel=composed)).stage_layers == plan_of(config).stage_layers


def test_a_record_beside_a_profile_is_no_option_of_the_command_line(tmp_path):
    write_profile("mine", tiny(), plan_of(tiny()), tmp_path / "parallel", device="cpu")
    assert (tmp_path / "parallel" / "records" / "mine.json").exists()
    assert options([tmp_path]) == {"parallel": ["mine"]}


def test_writing_again_needs_to_be_asked_and_makes_the_next_version_that_knows_what_it_replaces(tmp_path):
    config = tiny()
    write_profile("mine", config, plan_of(config), tmp_path, device="cpu")
    with pytest.raises(ValueError, match=r"mine.yaml exists \(version 1\); plan.overwrite=true"):
        write_profile("mine", config, plan_of(config), tmp_path, device="cpu")
    record = read_record("mine", tmp_path)
    record["observations"].append({"step_s": 1.0})
    write_record("mine", tmp_path, record)
    changed = tiny(parallel__recompute="full")
    path = write_profile("mine", changed, plan_of(changed), tmp_path, device="cpu", overwrite=True)
    assert yaml.safe_load(path.read_text())["version"] == 2
    after = read_record("mine", tmp_path)
    assert (after["profile"]["version"], after["observations"]) == (2, [])
    assert after["replaces"] == {"profile": record["profile"], "observations": [{"step_s": 1.0}]}


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a-b", "a b", ".hidden", "x.yaml", "8", "1e3"])
def test_a_name_that_is_no_files_name_is_one_line(name, tmp_path):
    with pytest.raises(ValueError, match=r"cannot be; use a letter, then letters, digits and _$"):
        write_profile(name, tiny(), plan_of(tiny()), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["on", "Null", "y", "tp8"])
def test_a_name_that_yaml_would_read_as_something_else_stays_a_name(name, tmp_path):
    path = write_profile(name, tiny(), plan_of(tiny()), tmp_path, device="cpu")
    assert yaml.safe_load(path.read_text())["name"] == name


def test_the_hash_is_of_what_splits_a_model_and_nothing_else():
    one = ParallelConfig(tp=2, pp=2)
    assert profile_hash(replace(one, name="other", version=7)) == profile_hash(one)
    others = [
        replace(one, tp=4), replace(one, pp=4), replace(one, sequence_parallel=True), replace(one, stages=[1, 3]),
        replace(one, schedule=Schedule["eager1f1b"]), replace(one, recompute=Recompute.full),
        replace(one, recompute_interval=2), replace(one, order=type(one.order)["data_pipe_tensor"]),
    ]  # fmt: skip
    assert len({profile_hash(other) for other in [one, *others]}) == 9
    # each knob but the labels was changed above: a knob added later must be tried here too
    changed = {field.name for field in dataclasses.fields(one)} - {"name", "version"}
    assert changed == {
        "tp", "pp", "sequence_parallel", "stages", "schedule", "recompute", "recompute_interval", "order"
    }  # fmt: skip


def test_comments_and_the_order_of_lines_change_no_hash(tmp_path):
    folder = tmp_path / "parallel"
    folder.mkdir()
    (folder / "a.yaml").write_text("# one\nname: a\ntp: 2\npp: 2\n")
    (folder / "b.yaml").write_text("# two\npp: 2 # stages\ntp: 2\nname: b\n")
    a, b = (Profile.of(compose_config([f"parallel={n}"], config_dir=str(tmp_path)).parallel) for n in "ab")
    assert (a.hash, a.name) == (b.hash, "a")


def test_a_record_keeps_the_whole_prediction_and_gives_back_the_config_it_was_made_of(tmp_path):
    config = replace(tiny(parallel__pp=2, parallel__tp=2), cluster=measured_cluster())
    config.train.global_batch_size = 16
    plan = plan_of(config)
    prediction = predict_run(config, plan, device="cpu")
    write_profile("mine", config, prediction, tmp_path, device="cpu", git_commit="abc")
    record = json.loads((tmp_path / "records" / "mine.json").read_text())
    kept = record["predicted"]
    assert (kept["step_s"], kept["bubble"], kept["imbalance"]) == (
        prediction.step_s, list(prediction.bubble), prediction.imbalance
    )  # fmt: skip
    assert kept["seconds"] == prediction.seconds and sum(kept["seconds"].values()) == pytest.approx(kept["step_s"])
    assert [stage["total"] for stage in kept["memory"]] == [ledger.total for ledger in prediction.ledgers]
    for stage, calls in zip(kept["communication"], prediction.collectives, strict=True):
        for axis in ("tensor", "pipe"):
            of_axis = [one for one in calls if one.collective.axis == axis]
            assert stage[axis]["bytes"] == sum(one.collective.total_bytes for one in of_axis)
            assert stage[axis]["seconds"] == pytest.approx(sum(one.seconds for one in of_axis))
    again = config_of(record)
    assert conditions(again, world_size=4) == conditions(config, world_size=4) and again.cluster == config.cluster
    assert renewed(record, git_commit="abc") == record


def test_a_file_that_is_no_record_is_one_line(tmp_path):
    (tmp_path / "records").mkdir()
    for text in ("{", "[]", '{"profile": 1}'):
        (tmp_path / "records" / "x.json").write_text(text)
        with pytest.raises(ValueError, match=r"x.json is not a profile's record \(.*\); write it again"):
            read_record("x", tmp_path)


@pytest.mark.parametrize("name", options()["parallel"])
def test_every_shipped_profile_has_its_record_and_this_planner_predicts_the_same(name):
    record = read_record(name, PROFILES)
    parallel = compose_config([f"parallel={name}"]).parallel
    assert record is not None, "a shipped profile has a record beside it"
    assert record["profile"]["hash"] == profile_hash(parallel) == profile_hash(config_of(record).parallel)
    assert (record["profile"]["name"], record["profile"]["version"]) == (name, parallel.version)
    again = renewed(record, git_commit=None)
    # A knob of the model that is null is the family's own; a record made before there was such a knob does not name it.
    record["conditions"]["model"] = dict.fromkeys(again["conditions"]["model"]) | record["conditions"]["model"]
    for part in ("conditions", "predicted"):
        assert again[part] == record[part], f"the planner changed ({part}): python -m parallel.profile COMMIT"


@pytest.mark.parametrize("name", options()["parallel"])
def test_a_shipped_profile_says_promoted_only_where_it_was_observed(name):
    record = read_record(name, PROFILES)
    promoted = [one for one in record["observations"] if one["promoted"]]
    assert record["status"].startswith("promoted" if promoted else PREDICTED_ONLY)
    assert all(one["device"] and one["software"] and one["rungs"] and not one["failures"] for one in promoted)


def test_no_record_is_left_without_its_profile():
    assert {path.stem for path in (PROFILES / "records").glob("*")} == set(options()["parallel"])
    assert Path(PROFILES / "records").is_dir()
