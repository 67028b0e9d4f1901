"""A profile is promoted by parity, memory and time together, and only for the conditions it was observed under."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from conf.schema import Config, DType
from parallel.profile import new_record
from parallel.promotion import (
    here,
    loss_bounds,
    memory_failures,
    parity_failures,
    replaced_step_s,
    standing,
    status,
    time_failures,
)
from tests.parallel.configs import tiny
from tests.parallel.test_profile import plan_of

SOFTWARE = {"torch": "2.13.0", "deepspeed": "0.19.8"}


def recorded(config: Config, *verdicts: list[str], **changes: Any) -> dict[str, Any]:
    """A record with an observation for each list of kinds of failures."""
    record = new_record(config, plan_of(config), None, device="cpu", git_commit=None)
    for kinds in verdicts:
        made = here(config, world_size=4, device="a CPU", software=SOFTWARE)
        failures = [{"rung": "composed", "kind": kind, "line": ""} for kind in kinds]
        observation = {"promoted": not kinds, "failures": failures, "step_s": 0.5, "kind": "ladder"}
        record["observations"].append(made | observation | changes)
    record["status"] = status(record)
    return record


def stands(record: Any, config: Config, **named: Any) -> str:
    named = {"world_size": 4, "device": "a CPU"} | named
    return standing(record, config, named.pop("versions", SOFTWARE), **named)


CONFIG = tiny(parallel__tp=2, parallel__pp=2)


def test_a_profile_stands_as_its_last_observation_here_says():
    assert stands(recorded(CONFIG), CONFIG) == "predicted only"
    assert stands(recorded(CONFIG, []), CONFIG) == "promoted"
    assert stands(recorded(CONFIG, ["time", "memory"]), CONFIG) == "predicted only: not promoted (time, memory)"
    assert stands(recorded(CONFIG, [], ["parity"]), CONFIG) == "predicted only: not promoted (parity)"
    assert stands(recorded(CONFIG, ["parity"], []), CONFIG) == "promoted"
    assert stands(None, CONFIG) == "predicted only: profile custom has no record"


def elsewhere() -> dict[str, tuple[Config, dict[str, Any], str]]:
    config = CONFIG
    return {
        "model": (
            replace(config, model=replace(config.model, num_layers=8)), {},
            "model differs (num_layers 8 here, 4 there)",
        ),
        "cluster": (
            replace(config, cluster=replace(config.cluster, name="dgx")), {},
            "cluster differs (name dgx here, local there)",
        ),
        "ranks": (config, {"world_size": 8}, "cluster differs (ranks 8 here, 4 there)"),
        "batch": (
            replace(config, train=replace(config.train, global_batch_size=16)), {},
            "batch differs (global_batch_size 16 here, 8 there)",
        ),
        "sequence": (
            replace(config, data=replace(config.data, sequence_length=64)), {},
            "batch differs (sequence_length 64 here, 32 there)",
        ),
        "precision": (
            replace(config, precision=replace(config.precision, dtype=DType.bf16)), {},
            "precision differs (dtype bf16 here, fp32 there)",
        ),
        "zero": (replace(config, zero=replace(config.zero, stage=0)), {}, "zero differs (stage 0 here, 1 there)"),
        "software": (
            config, {"versions": SOFTWARE | {"torch": "2.14.0"}},
            "software differs (torch 2.14.0 here, 2.13.0 there)",
        ),
        "device": (config, {"device": "another CPU"}, "device differs (another CPU here, a CPU there)"),
    }  # fmt: skip


@pytest.mark.parametrize("group", elsewhere())
def test_under_any_other_condition_it_is_not_observed_here(group):
    config, named, words = elsewhere()[group]
    assert stands(recorded(CONFIG, []), config, **named) == f"not observed here: {words}"
    assert stands(recorded(CONFIG), config, **named) == "predicted only"


def test_a_changed_knob_of_the_profile_is_not_observed_though_all_else_is():
    changed = replace(CONFIG, parallel=replace(CONFIG.parallel, sequence_parallel=True))
    words = f"not observed here: {CONFIG.parallel.name} with other knobs (sequence_parallel True here, default there)"
    assert stands(recorded(CONFIG, []), changed) == words


def test_a_models_label_and_unknown_software_are_no_difference():
    renamed = replace(CONFIG, model=replace(CONFIG.model, name="another label"))
    assert stands(recorded(CONFIG, []), renamed) == "promoted"
    assert stands(recorded(CONFIG, []), CONFIG, versions=None, device=None) == "promoted"


def test_the_record_says_for_whom_it_is_promoted():
    assert recorded(CONFIG, ["hang"])["status"] == "predicted only"
    assert recorded(CONFIG, [], [])["status"] == "promoted for tiny on 4 ranks of local (a CPU)"


@pytest.mark.parametrize(
    ("measured", "predicted", "replaced", "passes"),
    [
        (1.2, 1.0, None, True), (1.21, 1.0, None, False), (0.8, 1.0, None, True), (0.79, 1.0, None, False),
        (0.5, None, None, False), (1.5, 1.0, 1.6, True), (1.5, 1.0, 1.5, False), (0.5, None, 0.6, True),
    ],
)  # fmt: skip
def test_time_is_within_its_tolerance_or_better_than_what_it_replaces(measured, predicted, replaced, passes):
    found = time_failures("composed", measured_s=measured, predicted_s=predicted, tolerance=0.2, replaced_s=replaced)
    assert [one.kind for one in found] == ([] if passes else ["time"])
    if predicted is None and not passes:
        assert "measure them with recipes/probe.py" in found[0].line
    if replaced is not None and not passes:
        assert "not below the 1.5 s of the profile it replaces" in found[0].line


def test_memory_is_judged_by_the_worst_rank_and_never_without_a_limit():
    assert memory_failures("r", peak_bytes=[1e9, 2e9], limit=2e9) == []
    [found] = memory_failures("r", peak_bytes=[1e9, 3e9, 2.5e9], limit=2e9)
    assert (found.kind, found.line) == ("memory", "rank 1 held 3.000 GB at its peak, over the 2.000 GB of a device")
    [found] = memory_failures("r", peak_bytes=[1.0], limit=None)
    assert found.kind == "memory" and "promote.memory_limit" in found.line


def test_parity_is_that_of_every_common_step():
    baseline = {1: 5.0, 2: 4.0, 3: 3.0}
    assert parity_failures("r", {2: 4.00003, 3: 3.0}, baseline, relative=1e-5, absolute=0) == []
    [found] = parity_failures("r", {2: 4.0, 3: 3.0001}, baseline, relative=1e-5, absolute=0)
    assert found.kind == "parity" and "loss of step 3" in found.line and "1 of 2 steps" in found.line
    assert parity_failures("r", {1: math.nan}, baseline, relative=1e-5, absolute=0)[0].kind == "parity"
    [found] = parity_failures("r", {1: 5.1, 2: math.nan}, {1: 0.0, 2: math.nan}, relative=1e-5, absolute=0)
    assert found.line.startswith("the loss of step 2 is nan")
    assert "shares no step" in parity_failures("r", {9: 1.0}, baseline, relative=1e-5, absolute=0)[0].line


def test_bounds_are_those_of_the_parity_tests():
    assert loss_bounds("fp32", num_layers=4) == (1e-5, 0.0)
    relative, absolute = loss_bounds("bf16", num_layers=4)
    assert relative == 0 and absolute == pytest.approx(0.035, abs=5e-4)  # tests/engine/test_parity.py
    assert loss_bounds("fp16", num_layers=4)[1] == absolute / 8


def test_the_profile_it_replaces_counts_where_it_was_promoted_under_the_same_conditions():
    before = recorded(CONFIG, [], step_s=0.7)
    record = recorded(CONFIG) | {"replaces": {"observations": before["observations"]}}
    now = here(CONFIG, world_size=4, device="a CPU", software=SOFTWARE)
    assert replaced_step_s(record, now) == 0.7
    assert replaced_step_s(record, here(CONFIG, world_size=8, device="a CPU", software=SOFTWARE)) is None
    assert replaced_step_s(recorded(CONFIG), now) is None
    failed = recorded(CONFIG, ["parity"])
    assert replaced_step_s(recorded(CONFIG) | {"replaces": failed}, now) is None
