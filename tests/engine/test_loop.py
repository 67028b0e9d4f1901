"""The loop with a trainer that only sleeps: rates, counts, and the end of a run that is not finite (case H2)."""

from __future__ import annotations

import math
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from engine.device import this_device
from engine.loop import NonFiniteError, samples_after, train
from engine.session import Rates
from engine.step import StepResult
from parallel.groups import SINGLE
from parallel.plan import ParallelPlan
from telemetry.report import StepReport
from tests.engine.cases import RandomTokens, tiny_config


class SleepingTrainer:
    holds_data = True

    def __init__(self, *, seconds: float, losses: list[float] | None = None):
        self.seconds, self.losses = seconds, losses
        self.counts: list[int] = []

    def set_num_micro_batches(self, count: int) -> None:
        self.counts.append(count)

    def train_batch(self, batches: Any, *, lr: float) -> StepResult:
        time.sleep(self.seconds)
        unmasked = sum(int((batch.labels_BS != -100).sum()) for batch in batches)
        loss = self.losses[len(self.counts) - 1] if self.losses else 1.0
        return StepResult(loss=loss, grad_norm=1.0, skipped=not math.isfinite(loss), unmasked_tokens=unmasked)


def session(config: Any, *, world_size: int) -> Any:
    groups = SimpleNamespace(data=SINGLE, pipeline=SINGLE, tensor=SINGLE)
    streams = SimpleNamespace(seed_step=lambda **named: None)
    plan = ParallelPlan.from_config(config, world_size)
    return SimpleNamespace(config=config, plan=plan, groups=groups, streams=streams, device=this_device())


def reports(config: Any, trainer: Any, *, world_size: int = 1) -> list[StepReport]:
    dataset: Any = RandomTokens(vocab_size=config.model.vocab_size)
    rates = Rates(peak=1e12, measured=1e11)
    run = train(trainer, session(config, world_size=world_size), training=dataset, validation=None, rates=rates)
    return [report for report in run if isinstance(report, StepReport)]


@pytest.mark.parametrize(("world_size", "data"), [(2, 1), (4, 2)])
def test_throughput_counts_the_global_batch_over_the_whole_step(world_size: int, data: int) -> None:
    """Case H2: micro-batch 2, 4 micro-batches, 32 tokens, tp=2: 256 tokens a step and data rank, whatever tp."""
    config = tiny_config(
        parallel__tp=2, train__micro_batch_size=2, train__global_batch_size=8 * data, train__train_iters=3
    )
    got = reports(config, SleepingTrainer(seconds=0.25), world_size=world_size)
    tokens = 256 * data
    for step, report in enumerate(got, start=1):
        assert report.tokens == step * tokens
        assert report.step_time_s >= 0.25
        assert report.tokens_per_s == pytest.approx(tokens / report.step_time_s)
        assert report.tokens_per_s_per_device == pytest.approx(tokens / report.step_time_s / world_size)
        assert report.unmasked_tokens_per_s < report.tokens_per_s
        assert report.mfu == pytest.approx(report.model_flops_per_s_per_device / 1e12)
    assert got[-1].eta_s == 0


def test_ramp_up_changes_the_number_of_micro_batches_and_the_tokens_counted() -> None:
    config = tiny_config(train__batch_ramp_up=[2, 2, 12], train__train_iters=6)
    trainer = SleepingTrainer(seconds=0)
    got = reports(config, trainer)
    plan = ParallelPlan.from_config(config, 1)
    samples = [samples_after(plan, step) for step in range(7)]
    assert trainer.counts == [after - before for before, after in pairwise(samples)]
    assert trainer.counts[0] == 2 and trainer.counts[-1] == 8
    assert [report.tokens for report in got] == [32 * count for count in samples[1:]]


def test_a_run_stops_after_bad_steps_in_a_row_and_says_where() -> None:
    config = tiny_config(train__train_iters=9, train__max_bad_steps=3)
    losses = [1.0, math.nan, 1.0, math.nan, math.nan, math.nan]
    with pytest.raises(NonFiniteError, match=r"3 steps in a row, up to step 6 .*samples 40 to 47"):
        reports(config, SleepingTrainer(seconds=0, losses=losses))
