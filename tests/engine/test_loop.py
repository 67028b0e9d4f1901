"""The loop with a trainer that only sleeps: rates, counts, and the end of a run that is not finite (case H2)."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conf.schema import OnBadStep
from engine.checkpoints import Progress, SaveReport
from engine.device import this_device
from engine.failure import StopRun
from engine.loop import NonFiniteError, Run, train
from engine.schedules import samples_after
from engine.session import Rates
from engine.step import StepResult
from parallel.groups import SINGLE
from parallel.plan import ParallelPlan
from telemetry.report import StepReport
from telemetry.timeline import Timeline
from tests.engine.cases import RandomTokens, tiny_config


class SleepingTrainer:
    holds_data = True
    evaluation_multiple = 1

    def __init__(self, *, seconds: float, losses: list[float] | None = None):
        self.seconds, self.losses = seconds, losses
        self.counts: list[int] = []
        self.seen: list[list[int]] = []  # labels' sums, which tell samples apart

    def set_num_micro_batches(self, count: int) -> None:
        self.counts.append(count)

    def train_batch(self, batches: Any, *, lr: float) -> StepResult:
        time.sleep(self.seconds)
        unmasked = sum(int((batch.labels_BS != -100).sum()) for batch in batches)
        self.seen.append([int(row.sum()) for batch in batches for row in batch.tokens_BS])
        loss = self.losses[len(self.counts) - 1] if self.losses else 1.0
        return StepResult(loss=loss, grad_norm=1.0, skipped=not math.isfinite(loss), unmasked_tokens=unmasked)


def session(config: Any, *, world_size: int) -> Any:
    groups = SimpleNamespace(data=SINGLE, pipeline=SINGLE, tensor=SINGLE)
    streams = SimpleNamespace(seed_step=lambda **named: None)
    plan = ParallelPlan.from_config(config, world_size)
    return SimpleNamespace(
        config=config, plan=plan, groups=groups, streams=streams, device=this_device(), stop_requested=False,
        agree=lambda *flags: list(flags), finishes_steps=False,
    )  # fmt: skip


class NoCheckpoints:
    """One kept checkpoint at most, which `save` would be asked for."""

    must_stop = last_failed = False
    saved = 0, time.perf_counter()

    def __init__(self, kept: Progress | None = None):
        self.kept = kept
        self.loads = 0

    def poll(self) -> list[Any]:
        return []

    finish = poll

    def is_due(self, step: int) -> bool:
        return False

    def newest(self) -> Path | None:
        return None if self.kept is None else Path("step-4")

    def newest_first(self) -> list[Path]:
        return [Path("step-4")]

    def load_newest(self, candidates: list[Path], *, only: bool) -> Progress:
        assert self.kept is not None
        self.loads += 1
        return self.kept


def reports(
    config: Any,
    trainer: Any,
    *,
    world_size: int = 1,
    checkpoints: Any = None,
    timeline: Path | None = None,
    start: Progress = Progress(),  # noqa: B008
) -> list[StepReport]:
    dataset: Any = RandomTokens(vocab_size=config.model.vocab_size)
    run = Run(
        trainer, session(config, world_size=world_size), training=dataset, validation=None,
        rates=Rates(peak=1e12, measured=1e11), checkpoints=checkpoints or NoCheckpoints(), timeline=Timeline(timeline),
    )  # fmt: skip
    return [report for report in train(run, start) if isinstance(report, StepReport)]


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


def test_a_step_in_which_no_token_counts_is_told_with_its_samples(tmp_path: Path, capsys: Any) -> None:
    """Its loss of 0 would look like a perfect model's."""

    class Blind(SleepingTrainer):
        def train_batch(self, batches: Any, *, lr: float) -> StepResult:
            result = super().train_batch(batches, lr=lr)
            return dataclasses.replace(result, loss=0.0, unmasked_tokens=0) if len(self.counts) == 2 else result

    config = tiny_config(train__micro_batch_size=2, train__global_batch_size=4, train__train_iters=3)
    reports(config, Blind(seconds=0), timeline=tmp_path / "timeline.jsonl")
    [event] = map(json.loads, (tmp_path / "timeline.jsonl").read_text().splitlines())
    assert (event["event"], event["step"]) == ("no token counts", 2) and "samples 4 to 7" in event["message"]
    assert capsys.readouterr().out == f"step      2  {event['message']}\n"


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


@pytest.mark.parametrize("bad", [math.nan, 100.0], ids=["not finite", "spike"])
def test_roll_back_passes_over_the_offending_batch(bad: float, tmp_path: Path) -> None:
    """Step 12 is bad; the checkpoint is of step 10: steps 11 and 12 again, without the samples of step 12."""
    config = tiny_config(
        train__train_iters=14, train__on_bad_step=OnBadStep.rollback, train__spike_factor=3.0,
        train__global_batch_size=2,
    )  # fmt: skip
    trainer = SleepingTrainer(seconds=0, losses=[1.0] * 11 + [bad] + [1.0] * 10)
    checkpoints = NoCheckpoints(Progress(step=10, samples=20, tokens=640))
    got = reports(config, trainer, checkpoints=checkpoints, timeline=tmp_path / "timeline.jsonl")
    assert [report.step for report in got] == [*range(1, 13), 11, 12, 13, 14]
    assert [report.tokens for report in got[-4:]] == [704, 768, 832, 896]
    dataset = RandomTokens(vocab_size=config.model.vocab_size)
    of_step = lambda step: [int(dataset.sample(2 * step - 2 + row).tokens[:-1].sum()) for row in range(2)]  # noqa: E731
    assert trainer.seen == [of_step(step) for step in [*range(1, 13), 11, 13, 14, 15]]
    events = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["bad step", "rollback"]
    assert events[0]["samples"] == [22, 24] and events[1]["passed_over"] == [[22, 24]]


def test_roll_backs_to_one_checkpoint_end_with_a_message() -> None:
    config = tiny_config(train__train_iters=9, train__on_bad_step=OnBadStep.rollback, train__max_bad_steps=2)
    trainer = SleepingTrainer(seconds=0, losses=[1.0] + [math.nan] * 9)
    with pytest.raises(NonFiniteError, match="rolled back to step 1 3 times"):
        reports(config, trainer, checkpoints=NoCheckpoints(Progress(step=1, samples=8, tokens=256)))


def test_a_bad_step_without_a_checkpoint_is_skipped() -> None:
    config = tiny_config(train__train_iters=3, train__on_bad_step=OnBadStep.rollback)
    got = reports(config, SleepingTrainer(seconds=0, losses=[1.0, math.nan, 1.0]))
    assert [report.step for report in got] == [1, 2, 3]


def rates_of(config: Any, start: Progress = Progress()) -> list[float]:  # noqa: B008
    return [report.learning_rate for report in reports(config, SleepingTrainer(seconds=0), start=start)]


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_the_learning_rate_goes_on_where_it_was(micro_batches: int) -> None:
    """Case C4: one step of the schedule an optimizer step, whatever the accumulation; a resume overlays."""
    config = tiny_config(
        train__lr=1e-3, train__lr_warmup=4, train__train_iters=10, train__min_lr_ratio=0.1,
        train__micro_batch_size=8 // micro_batches,
    )  # fmt: skip
    whole = rates_of(config)
    assert len(whole) == 10
    assert whole[3] == pytest.approx(1e-3) and whole[9] == pytest.approx(1e-4)
    assert rates_of(config, Progress(step=5, samples=40, tokens=1280)) == whole[5:]
    config.train.lr_warmup = 10
    assert max(rates_of(config)) == pytest.approx(1e-3)


def test_no_run_is_complete_without_its_last_checkpoint() -> None:
    """Also where the save failed while the loop waited for it; it is tried once more."""
    config = tiny_config(train__train_iters=2)
    checkpoints: Any = NoCheckpoints()
    checkpoints.last_failed = True
    checkpoints.save = lambda progress, *, wait: [SaveReport(progress.step, 0.0, 0.0, 0, error="no space")]
    with pytest.raises(StopRun, match="all steps are trained, but the last checkpoint failed: no space"):
        reports(config, SleepingTrainer(seconds=0), checkpoints=checkpoints)


@pytest.mark.parametrize(("stage", "steps"), [(1, [0, 2, 3]), (3, [2, 3])])
def test_zero_3_is_not_evaluated_before_its_first_step(stage: int, steps: list[int]) -> None:
    """DeepSpeed traces the first passes it sees: after a forward pass alone it gathers every weight twice, for good."""
    config = tiny_config(zero__stage=stage, train__train_iters=3, train__eval_interval=2, train__eval_samples=2)
    dataset: Any = RandomTokens(vocab_size=config.model.vocab_size)
    trainer: Any = SleepingTrainer(seconds=0.0)
    trainer.evaluate = lambda batches: 2.0
    run = Run(
        trainer, session(config, world_size=1), training=dataset, validation=dataset,
        rates=Rates(peak=None, measured=1e11), checkpoints=NoCheckpoints(), timeline=Timeline(None),  # type: ignore[arg-type]
    )  # fmt: skip
    assert [one.step for one in train(run, Progress()) if not isinstance(one, StepReport)] == steps
