"""What the first steps measure: waits between stages, collectives as the ledger counts them, and when it is over."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conf.schema import Config, Schedule
from engine.collective_times import CollectiveTimes
from engine.first_steps import LAST, FirstSteps
from engine.instruction_clock import InstructionClock
from parallel.communication import ledger
from parallel.groups import SINGLE, AxisGroup
from tests.engine.cases import tiny_config
from tests.engine.on_ranks import one_step, open_trainer
from tests.ranks import run_ranks
from tests.telemetry.reports import report

CPU = torch.device("cpu")


def uneven_stages() -> tuple[float, float, dict[str, list[float]]]:
    """Rank 1 works 0.3 s longer; both then come to the optimizer step."""
    rank = dist.get_rank()
    clock = InstructionClock(AxisGroup("pipe", rank, 2, (0, 1), dist.group.WORLD), CPU)
    clock.run("ForwardPass", lambda: None)  # off: nothing is kept
    dist.barrier()
    with clock:
        clock.run("RecvActivation", lambda: time.sleep(0.05))
        clock.run("RecvActivation", lambda: time.sleep(0.10))
        clock.run("ForwardPass", lambda: time.sleep(0.1 + 0.3 * rank))
        clock.run("OptimizerStep", lambda: time.sleep(0.05))
    return clock.waiting_s, clock.transfer_s, clock.seconds


def test_waiting_is_receives_and_the_wait_for_the_slowest_stage_before_the_optimizer_step():
    (early, transfer, seconds), (late, _, _) = run_ranks(2, uneven_stages)
    assert late >= 0.15, "both receives"
    assert early - late == pytest.approx(0.3, abs=0.1)  # a busy machine lengthens sleeps
    assert transfer == pytest.approx(2 * 0.05, abs=0.04), "the fastest receive, twice"
    assert len(seconds["ForwardPass"]) == 1 and seconds["OptimizerStep"][0] >= 0.05


def test_a_clock_that_is_off_keeps_nothing():
    clock = InstructionClock(SINGLE, CPU)
    clock.run("RecvActivation", lambda: time.sleep(0.01))
    with clock:
        pass
    assert clock.seconds == {} and clock.waiting_s == 0


def counted(config: Config) -> tuple[dict[str, dict[str, float]], dict[str, tuple[int, int]]]:
    """(measured by axis, the ledger's (calls, bytes) by axis) of this rank's second step."""
    trainer, plan, groups, streams = open_trainer(config)
    one_step(trainer, plan, groups, streams, config, 1)  # shapes of what travels are exchanged once
    with CollectiveTimes(groups, CPU) as times:
        one_step(trainer, plan, groups, streams, config, 2)
    dist.barrier()
    expected: dict[str, tuple[int, int]] = {}
    for call in ledger(config, plan, groups.pipeline.rank):
        calls, total = expected.get(call.axis, (0, 0))
        expected[call.axis] = calls + call.calls, total + call.total_bytes
    return times.axes, expected


PLANS = [
    (4, dict(parallel__tp=2, parallel__pp=2, zero__stage=1)),
    (4, dict(parallel__tp=2, parallel__sequence_parallel=True, zero__stage=0)),
    (2, dict(parallel__pp=2, parallel__schedule=Schedule["eager1f1b"], zero__stage=0)),
]


@pytest.mark.parametrize(("ranks", "changes"), PLANS, ids=["tp2-pp2-zero1", "tp2-dp2-sp", "pp2-eager"])
def test_the_collectives_of_a_step_are_those_of_the_ledger(ranks, changes):
    """Beside the ledger there are numbers of a few bytes: gradient norm, count of tokens, the loss's mean."""
    few = 200
    for measured, expected in run_ranks(ranks, counted, tiny_config(**changes), timeout_s=120):
        for axis, (calls, total) in expected.items():
            assert total <= measured[axis]["bytes"] <= total + few, axis
            assert measured[axis]["calls"] >= calls
            assert measured[axis]["seconds"] > 0 or axis == "pipe"
        for axis in measured.keys() - expected.keys():
            assert measured[axis]["bytes"] <= few, axis


def test_it_is_over_after_the_timed_steps(monkeypatch):
    entered: list[str] = []

    class Step:
        states = SimpleNamespace(weights=1, gradients=2, master_weights=3, optimizer_moments=4)
        activations = 5

        def __init__(self, trainer: Any) -> None: ...
        def __enter__(self) -> None:
            entered.append("memory")

        def __exit__(self, *error: Any) -> None: ...

    monkeypatch.setattr("engine.first_steps.MeasuredStep", Step)
    monkeypatch.setattr("engine.first_steps.gather", lambda value: [value])
    device = SimpleNamespace(peak_memory_bytes=lambda: 900)
    session: Any = SimpleNamespace(device=device, groups=SimpleNamespace(pipeline=SINGLE))
    steps = FirstSteps(session, collectives=False, memory_before=400)
    trainer: Any = SimpleNamespace(clock=SimpleNamespace(waiting_s=0.1, transfer_s=0.02))
    ends = []
    for number in range(1, LAST + 4):
        with steps.watch(trainer):
            entered.append("step")
        ends.append(steps.add(report(step=number, step_time_s=float(number), mfu=None)))
    assert ends == [number == LAST for number in range(1, LAST + 4)]
    assert entered == ["memory", *["step"] * (LAST + 3)]
    [rank], whole = steps.results()
    assert (whole.first_step, whole.last_step, whole.step_s, whole.mfu) == (3, 5, 4.0, None)
    assert (rank.activations, rank.peak_bytes, rank.growth_bytes) == (5, 900, 500)
    assert rank.bubble == pytest.approx(0.1 / 4)
