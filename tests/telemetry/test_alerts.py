"""Each shipped alert rule on recorded series: its boundary, its persistence, raised once and cleared once."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import median

import pytest

from conf.schema import AlertReference, AlertRule, AlertSlice, NormalRange, Persistence
from parallel.expectation import Expectation
from telemetry.alert_values import values
from telemetry.alerts import CLEARED, RAISED, Alerts, silent
from tests.telemetry.alert_cases import CASES, EXPECTED, INF, NAN, PREDICTED, Driven, ranks, shipped


def rule(
    metric: str = "train/loss", *, n: int = 1, m: int = 1, where: AlertSlice = AlertSlice.run, **normal
) -> AlertRule:
    return AlertRule(metric, "me", "do", slice=where, normal=NormalRange(**normal), persistence=Persistence(n, m))


def opened(one: AlertRule, expectation: Expectation = EXPECTED) -> Alerts:
    alerts = Alerts({"x": one})
    alerts.begin(expectation)
    return alerts


def fed(alerts: Alerts, *values, first: int = 1, metric: str = "train/loss") -> list[tuple[str, int]]:
    """(event, step) of each value in turn."""
    found = []
    for step, value in enumerate(values, first):
        events = alerts.observe({"train/loss": 1.0, metric: value}, None, step)
        found += [(event["event"], event["step"]) for event in events]
    return found


def test_every_shipped_rule_is_driven():
    assert set(CASES) == set(shipped())


@pytest.mark.parametrize("name", CASES)
def test_values_inside_and_on_the_bound_raise_nothing(name):
    driven = Driven(name)
    assert driven.feed(*[driven.case.inside, driven.case.bound] * 2 * driven.rule.persistence.m) == []


@pytest.mark.parametrize("name", CASES)
def test_one_outside_too_few_of_the_last_m_raises_nothing(name):
    driven = Driven(name)
    n, m = driven.rule.persistence.n, driven.rule.persistence.m
    window = [driven.case.outside] * (n - 1) + [driven.case.inside] * (m - n + 1)
    assert driven.feed(*window * 4) == []


@pytest.mark.parametrize("name", CASES)
def test_n_outside_raise_once_and_enough_inside_clear_once_and_it_can_come_again(name):
    driven = Driven(name)
    case, (n, m) = driven.case, (driven.rule.persistence.n, driven.rule.persistence.m)
    for _ in range(2):
        assert driven.feed(*[case.outside] * (n - 1)) == []
        (raised,) = driven.feed(case.outside)
        assert (raised["event"], raised["alert"], raised["slice"]) == (RAISED, name, case.slice)
        assert driven.feed(*[case.outside] * m) == []
        until_cleared = max(n, m - n + 1)  # fewer than n of m outside, and n inside
        assert driven.feed(*[case.inside] * (until_cleared - 1)) == []
        (cleared,) = driven.feed(case.inside)
        assert (cleared["event"], cleared["slice"], cleared["step"]) == (CLEARED, case.slice, driven.step)
        assert driven.feed(*[case.inside] * m) == []


def test_n_of_m_counts_observations_that_are_not_in_a_row():
    alerts = opened(rule(n=2, m=4, max=1.0))
    assert fed(alerts, 2, 0, 0, 0, 2, 0, 0, 2) == [(RAISED, 8)]


def test_an_event_says_value_range_owner_and_what_to_try():
    (event,) = Driven("checkpoint_age").feed(151)
    assert event["range"] == [None, 150.0] and event["value"] == 151.0
    for part in ("checkpoint_age (run)", "151", "150 or less", "1.5 or less x", "storage", "SIGUSR1"):
        assert part in event["message"]
    assert (event["owner"], event["severity"], event["action"]) == ("storage", "error", "wandb")
    assert "\n" not in event["message"]


def test_a_straggler_is_named_with_its_host():
    driven = Driven("straggler")
    (event,) = driven.feed(*[2.0] * 4)
    assert "rank 2 on host2" in event["message"] and event["slice"] == "rank 2"


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("bounds", [{}, {"max": 5.0}, {"min": 5.0}, {"max": 2.0, "relative_to": AlertReference.recent}])
def test_a_number_that_is_not_finite_is_outside_of_every_range(value, bounds):
    assert fed(opened(rule(**bounds)), value)[0][0] == RAISED


def test_nan_never_enters_the_recent_median():
    alerts = opened(rule(max=2.0, relative_to=AlertReference.recent, window=4))
    assert fed(alerts, 1, 1, NAN, 1, 1.5, 2.5) == [(RAISED, 3), (CLEARED, 4), (RAISED, 6)]


@pytest.mark.parametrize("row", [{}, {"train/loss": None}, {"train/loss": "nan"}, {"validation/loss": 9.0}])
def test_a_step_without_the_metric_is_no_observation(row):
    alerts = opened(rule(n=2, m=2, max=1.0))
    assert alerts.observe({"train/loss": 2.0}, None, 1) == []
    assert alerts.observe(row, None, 2) == []
    assert [event["event"] for event in alerts.observe({"train/loss": 2.0}, None, 3)] == [RAISED]


def test_peers_are_the_other_ranks_of_the_stage():
    chance = random.Random(0)
    for count in (2, 3, 4, 7, 8):
        numbers = [chance.choice([1.0, 2.0, 3.5, 9.0]) for _ in range(2 * count)]
        found = values(shipped()["straggler"], {}, ranks(*numbers), plan="")
        for one in found:
            rank = int(one.slice.removeprefix("rank "))
            stage = range(count) if rank < count else range(count, 2 * count)
            assert one.peers == median(numbers[other] for other in stage if other != rank)


def test_ranks_without_numbers_or_peers_are_no_observation():
    straggler = Alerts({"straggler": shipped()["straggler"]})
    straggler.begin(EXPECTED)
    for step in range(1, 20):
        assert straggler.observe({}, ranks(9.0, 1.0), step) == []  # a stage of one rank has no peers
        assert straggler.observe({}, ranks(9.0, None, 1.0, None), step) == []
        assert straggler.observe({}, None, step) == []


def test_a_lasting_drop_stays_raised_until_it_is_gone():
    driven = Driven("throughput_drop")
    assert [event["event"] for event in driven.feed(*[500.0] * 300)] == [RAISED]
    assert [event["event"] for event in driven.feed(*[1000.0] * 10)] == [CLEARED]


def test_a_loss_that_falls_and_a_norm_that_settles_are_healthy():
    for name, start in (("loss_spike", 11.0), ("gradient_norm", 40.0)):
        alerts = Alerts({name: shipped()[name]})
        alerts.begin(EXPECTED)
        metric = shipped()[name].metric
        for step in range(1, 400):
            value = (start - 2) / step + 2 + 0.2 * math.sin(step)
            assert alerts.observe({metric: value}, None, step) == []


@pytest.mark.parametrize(
    "name", [name for name, one in shipped().items() if one.normal.relative_to.value == "prediction"]
)
def test_what_needs_a_prediction_is_silent_without_one(name):
    nothing = {"device": "cpu", "memory": PREDICTED["memory"], "communication": [{"tensor": {"seconds": None}}]}
    expectation = Expectation("p", "a", nothing, None, checkpoint_interval=0)
    alerts = Alerts({name: shipped()[name]})
    alerts.begin(expectation)
    for step in range(1, 50):
        assert alerts.observe(*CASES[name].row(CASES[name].outside), step) == []
    assert silent(alerts.rules, expectation) == {name: "prediction"}
    assert silent(alerts.rules, EXPECTED) == {}


def test_a_promoted_observation_is_a_reference():
    observed = {
        "step_s": 2.0,
        "conditions": {"batch": {"global_batch_size": 8, "sequence_length": 100}, "cluster": {"ranks": 4}},
    }
    one = rule("train/tokens_per_s", min=0.9, relative_to=AlertReference.observation)
    assert silent({"x": one}, EXPECTED) == {"x": "observation"}
    alerts = opened(one, replace(EXPECTED, observed=observed))  # 400 tokens/s: 360 is the bound
    assert fed(alerts, 360, 359, metric="train/tokens_per_s") == [(RAISED, 2)]


def test_stages_are_apart_and_one_that_was_not_predicted_is_left_alone():
    driven = Driven("pipeline_bubble")
    row = {
        "pipeline/bubble/stage0": 0.9,
        "pipeline/bubble/stage1": 0.2,
        "pipeline/bubble/stage7": 0.9,
        "pipeline/bubble": 0.9,
    }
    events = [event for step in range(1, 9) for event in driven.alerts.observe(row, None, step)]
    assert [event["slice"] for event in events] == ["stage 0"]


def test_a_step_that_comes_again_counts_once():
    alerts = opened(rule(n=2, m=2, max=1.0))
    assert fed(alerts, 0, 2) == []
    assert fed(alerts, 0, 2, first=2) == []  # step 2 again, inside now: step 3 is the first outside
    assert fed(alerts, 2, first=4) == [(RAISED, 4)]
    assert fed(alerts, 2, 2, first=3) == []  # again, raised already
    assert fed(alerts, 0, 0, first=5) == [(CLEARED, 6)]


def test_an_evaluation_after_its_step_takes_nothing_back():
    alerts = opened(rule(n=2, m=2, max=1.0))
    alerts.observe({"train/loss": 2.0}, None, 1)
    alerts.observe({"validation/loss": 3.0}, None, 1)
    assert [event["event"] for event in alerts.observe({"train/loss": 2.0}, None, 2)] == [RAISED]


def test_another_plan_clears_all_slices_but_the_runs():
    rules = {
        "pace": rule("train/tokens_per_s", where=AlertSlice.plan, max=1.0),
        "loss": rule("train/loss", max=1.0),
        "stage": rule("pipeline/bubble", where=AlertSlice.stage, max=0.1),
    }
    alerts = Alerts(rules)
    alerts.begin(EXPECTED)
    row = {"train/loss": 2.0, "train/tokens_per_s": 2.0, "pipeline/bubble/stage1": 0.5}
    assert {event["slice"] for event in alerts.observe(row, None, 1)} == {"run", "stage 1", "plan tp2_pp2"}
    assert alerts.begin(EXPECTED) == []
    gone = alerts.begin(replace(EXPECTED, plan="tp1", identity="b"))
    assert {(event["event"], event["slice"]) for event in gone} == {(CLEARED, "stage 1"), (CLEARED, "plan tp2_pp2")}
    assert {event["slice"] for event in alerts.observe(row, None, 2)} == {"stage 1", "plan tp1"}
