"""The step time that a search asks for, against the simulation of every pass."""

from __future__ import annotations

import random

import pytest

from parallel.timeline import StageTimes, estimate_step_s, simulate

SCHEDULES = ("1f1b", "eager1f1b", "dualpipev", "gpipe", "interleaved")


def drawn(generator: random.Random, schedule: str, most_ranks: int) -> tuple[int, int, int]:
    """Ranks, stages, micro-batches: few and many against the ranks."""
    ranks = generator.randint(2 if schedule == "dualpipev" else 1, most_ranks)
    if schedule == "dualpipev":
        return ranks, 2 * ranks, 2 * ranks + generator.choice([0, 1, 2, 3, 5, 9, 30])
    if schedule == "interleaved":
        return ranks, ranks * generator.randint(2, 4), ranks * generator.randint(1, 14)
    return ranks, ranks, generator.choice([generator.randint(1, ranks), generator.randint(1, 40)])


def times(generator: random.Random, stages: int, *, least: float, most: float, send_s: float) -> list[StageTimes]:
    draw = generator.uniform
    return [StageTimes(draw(least, most), 2 * draw(least, most), draw(0, send_s)) for _ in range(stages)]


def errors(schedule: str, *, cases: int, most_ranks: int, **spread: float) -> list[float]:
    generator = random.Random(f"{schedule} {spread}")
    found = []
    for _ in range(cases):
        ranks, stages, count = drawn(generator, schedule, most_ranks)
        drawn_times = times(generator, stages, **spread)
        estimate = estimate_step_s(schedule, drawn_times, ranks=ranks, num_micro_batches=count)
        found.append(estimate / simulate(schedule, drawn_times, ranks=ranks, num_micro_batches=count).step_s - 1)
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("send_s", [0.0, 0.05])
def test_the_estimate_is_the_simulated_step_where_stages_are_about_balanced(schedule, send_s):
    found = errors(schedule, cases=25, most_ranks=7, least=1, most=1.2, send_s=send_s)
    assert max(map(abs, found)) < 1e-12, "sums of a few thousand floats, in another order"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_estimate_is_within_a_hundredth_where_stages_and_transfers_differ_wildly(schedule):
    found = errors(schedule, cases=25, most_ranks=7, least=0.5, most=2, send_s=0.5)
    assert max(map(abs, found)) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("spread", "send_s"), [(0.2, 0.05), (1.0, 0.0), (1.0, 0.5)])
def test_estimates_of_many_pipelines(schedule, spread, send_s):
    found = errors(schedule, cases=80, most_ranks=10, least=1, most=1 + spread, send_s=send_s)
    exact = spread == 0.2 or (send_s == 0 and schedule != "interleaved")
    assert max(map(abs, found)) < (1e-12 if exact else 0.01)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_more_micro_batches_take_no_more_time_to_estimate_and_each_adds_the_slowest_ranks_own(schedule):
    generator = random.Random(schedule)
    stages = times(generator, 16 if schedule in ("dualpipev", "interleaved") else 8, least=1, most=1.1, send_s=0)
    first, second = (estimate_step_s(schedule, stages, ranks=8, num_micro_batches=m) for m in (8_000_000, 8_000_800))
    busy = [0.0] * 8
    for stage, one in enumerate(stages):
        rank = min(stage, 15 - stage) if schedule == "dualpipev" else stage % 8
        busy[rank] += one.forward_s + one.backward_s
    slowest = max(busy)
    if schedule == "gpipe":  # all forwards first: the slowest stage may be another one in each direction
        slowest = max(stage.forward_s for stage in stages) + max(stage.backward_s for stage in stages)
    assert (second - first) / 800 == pytest.approx(slowest, rel=1e-6)


def test_a_pipeline_that_cannot_run_has_no_estimate():
    with pytest.raises(ValueError, match="dualpipev has two stages a rank: 2 stages do not fit 2 ranks"):
        estimate_step_s("dualpipev", [StageTimes(1, 2)] * 2, ranks=2, num_micro_batches=8)
