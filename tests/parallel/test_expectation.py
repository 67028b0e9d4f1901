"""What an alert compares with: the plan's own prediction, and observations as promotion keeps them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from conf.cli import compose_config
from conf.load import to_plain
from conf.schema import AlertReference, AlertSlice
from parallel.expectation import Expectation
from parallel.plan import ParallelPlan
from parallel.prediction import predict_run
from parallel.promotion import promoted_observation
from parallel.record import predicted
from tests.parallel.test_promotion import CONFIG, SOFTWARE, recorded

PREDICTION, OBSERVATION = AlertReference.prediction, AlertReference.observation


def expectation(device: str) -> tuple[Expectation, object]:
    """Of a plan on a cluster whose rates are known, as plan.json and config.json keep it."""
    config = compose_config(["cluster=dgx_h100", "parallel.tp=2", "parallel.pp=2", "precision=bf16", "model=llama_1b"])
    plan = ParallelPlan.from_config(config, 8, device="cuda")
    whole = predict_run(config, plan, device="cuda")
    about = {"predicted": predicted(config, plan, whole, device=device), "profile": {"name": "mine"}}
    kept = json.loads(json.dumps([asdict(plan) | about, to_plain(config)], default=str))
    return Expectation.of(*kept), whole


def test_numbers_are_those_of_the_prediction():
    expected, whole = expectation("cuda")
    run = {
        "train/mfu": whole.mfu, "train/hfu": whole.hfu, "train/step_time_s": whole.step_s,
        "train/tokens_per_s": whole.tokens_per_s, "pipeline/imbalance": whole.imbalance,
        "pipeline/bubble": sum(whole.bubble) / 2, "memory/peak_bytes": max(one.total for one in whole.ledgers),
        "train/checkpoint_age_steps": 500, "pipeline/recompute_share": 0.0,
    }  # fmt: skip
    for where in (AlertSlice.run, AlertSlice.plan):
        for metric, number in run.items():
            assert expected.number(PREDICTION, where, metric) == pytest.approx(number, rel=1e-6), metric
    for stage in (0, 1):
        assert expected.number(PREDICTION, AlertSlice.stage, "pipeline/bubble", stage) == whole.bubble[stage]
        for where, metric in ((AlertSlice.stage, "memory/growth_bytes"), (AlertSlice.rank, "peak_bytes")):
            assert expected.number(PREDICTION, where, metric, stage) == round(whole.ledgers[stage].total)
    assert expected.number(PREDICTION, AlertSlice.stage, "pipeline/bubble", 2) is None
    calls = [sum(p.seconds for p in priced if p.collective.axis == "tensor") for priced in whole.collectives]
    assert expected.number(PREDICTION, AlertSlice.axis, "communication/seconds", "tensor") == pytest.approx(max(calls))
    assert expected.number(PREDICTION, AlertSlice.axis, "communication/seconds", "sideways") is None
    exposed = expected.number(PREDICTION, AlertSlice.run, "communication/exposed_share")
    waits = whole.seconds["tensor"] + whole.seconds["data"] + whole.seconds["pipe"]
    assert exposed == pytest.approx(waits / whole.step_s)
    overlap = expected.number(PREDICTION, AlertSlice.run, "communication/overlap_share")
    meets = sum(p.seconds for one in whole.collectives for p in one if p.collective.operation != "send_recv") / 2
    assert overlap == pytest.approx(1 - (waits - whole.seconds["pipe"]) / meets, rel=0.01)  # both ways of a transfer
    assert 0 < overlap < 1


def test_a_cpu_has_no_predicted_memory_and_no_interval_no_age():
    expected, _ = expectation("cpu")
    assert expected.number(PREDICTION, AlertSlice.run, "memory/peak_bytes") is None
    assert expected.number(PREDICTION, AlertSlice.stage, "memory/growth_bytes", 0) is None
    never = replace(expected, checkpoint_interval=0)
    assert never.number(PREDICTION, AlertSlice.run, "train/checkpoint_age_steps") is None


def test_two_plans_of_one_profile_are_told_apart():
    expected, _ = expectation("cuda")
    shape = json.loads(expected.identity)
    other = Expectation.of(shape | {"data_parallel_size": 4, "predicted": {}}, {"checkpoint": {"interval": 5}})
    same = Expectation.of(shape | {"predicted": {"mfu": 1}, "observed": {}}, {"checkpoint": {"interval": 5}})
    assert same.identity == expected.identity != other.identity


def found(record: object) -> object:
    return promoted_observation(record, CONFIG, SOFTWARE, world_size=4, device="a CPU")


def test_the_last_observation_that_promoted_here_is_the_reference():
    record = recorded(CONFIG, [], [], ["time"])
    record["observations"][0]["step_s"], record["observations"][1]["step_s"] = 0.9, 0.4
    assert found(record)["step_s"] == 0.4
    assert found(recorded(CONFIG, ["time"])) is None and found(None) is None
    assert promoted_observation(record, CONFIG, SOFTWARE, world_size=4, device="a GPU") is None
    changed = replace(CONFIG, parallel=replace(CONFIG.parallel, tp=4))
    assert promoted_observation(record, changed, SOFTWARE, world_size=4, device="a CPU") is None


def test_a_ladder_gives_times_and_a_filled_in_run_gives_its_stages_too():
    [ladder] = recorded(CONFIG, [])["observations"]
    expected = Expectation("p", "a", {}, ladder, checkpoint_interval=1)
    tokens = CONFIG.train.global_batch_size * CONFIG.data.sequence_length / 0.5
    assert expected.number(OBSERVATION, AlertSlice.run, "train/step_time_s") == 0.5
    assert expected.number(OBSERVATION, AlertSlice.plan, "train/tokens_per_s") == tokens
    assert expected.number(OBSERVATION, AlertSlice.run, "train/tokens_per_s_per_device") == tokens / 4
    assert expected.number(OBSERVATION, AlertSlice.run, "train/mfu") is None
    assert expected.number(OBSERVATION, AlertSlice.stage, "pipeline/bubble", 0) is None
    stages = [{"bubble": {"measured": 0.1}, "memory": {"growth": {"measured": 7}}}]
    run = ladder | {"measured": {"mfu": {"measured": 0.4}, "stages": stages}}
    filled = replace(expected, observed=run)
    assert filled.number(OBSERVATION, AlertSlice.run, "train/mfu") == 0.4
    assert filled.number(OBSERVATION, AlertSlice.stage, "pipeline/bubble", 0) == 0.1
    assert filled.number(OBSERVATION, AlertSlice.stage, "memory/growth_bytes", 0) == 7
    assert filled.number(OBSERVATION, AlertSlice.stage, "memory/growth_bytes", 1) is None
