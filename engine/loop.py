"""The training loop: batches in, reports out. Everything it decides is a pure function of config, plan and step.

Not here: how a step is computed (engine/pipeline.py, engine/zero.py) and who reads the reports (telemetry/).
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

from conf.schema import Config, OnBadStep
from corpus.batches import StepBatches, evaluation_batches
from corpus.dataset import Dataset, PassedOver, merged_ranges, passed_over_place
from engine import last_state
from engine.checkpoints import Checkpoints, Progress, SaveReport
from engine.distributed import broadcast
from engine.failure import StoppedByAlert, StoppedOnRequest, StopRun
from engine.schedules import learning_rate_at, samples_after
from engine.session import Rates, Session
from engine.step import Trainer
from parallel.training_flops import training_flops_per_token, training_hardware_flops_per_token
from telemetry.report import EvaluationReport, StepReport
from telemetry.timeline import Timeline


class NonFiniteError(StopRun):
    """Too many steps in a row had a non-finite loss or gradient."""


@dataclass(frozen=True)
class Run:
    """What the loop works with: data, checkpoints, and the timeline that its events go to. watch: entered around every
    train_batch; see: completes the report of its step; alert: the event of the alert that asks to stop, on rank 0.
    """

    trainer: Trainer
    session: Session
    training: Dataset
    validation: Dataset | None
    rates: Rates
    checkpoints: Checkpoints
    timeline: Timeline
    watch: Callable[[Trainer, int], AbstractContextManager[Any]] = lambda trainer, step: nullcontext()
    see: Callable[[StepReport], StepReport] = lambda report: report
    alert: Callable[[], dict[str, Any] | None] = lambda: None

    @cached_property
    def total_tokens(self) -> int:
        """Token slots of the whole run, under this plan."""
        config = self.session.config
        return samples_after(self.session.plan, config.train.train_iters) * config.data.sequence_length


def train(run: Run, start: Progress) -> Iterator[StepReport | EvaluationReport]:
    """Train from `start` to `train.train_iters` steps, yielding a report a step and one an evaluation; on all ranks.

    Raises, on every rank at the same step: NonFiniteError after `train.max_bad_steps` bad steps in a row;
    StoppedOnRequest when somebody asked to stop and the step is saved; StopRun where a failed save shall stop the run.
    """
    began = time.perf_counter() - start.seconds
    # After a forward pass alone, DeepSpeed's ZeRO 3 would gather each layer's weights apart and twice, to the end.
    if start.step == 0 and _evaluates(run) and run.session.plan.zero_stage < 3:
        yield _evaluate(run, start, began)
    progress, rollbacks = start, Counter[int]()
    run.session.finishes_steps = True
    while progress.step < run.session.config.train.train_iters:
        reached = yield from _train_until_bad(run, progress, began)
        progress = _roll_back(run, reached, rollbacks) if isinstance(reached, _BadStep) else reached
    _finish_saves(run, progress)
    run.session.finishes_steps = False


def _train_until_bad(
    run: Run, progress: Progress, began: float
) -> Generator[StepReport | EvaluationReport, None, Progress | _BadStep]:
    """Steps to the end, or to one that is to be rolled back. began: when the run would have, had it never paused."""
    session, config, plan = run.session, run.session.config, run.session.plan
    recent: deque[StepReport] = deque(maxlen=50)
    bad_steps = 0
    dataset = PassedOver(run.training, progress.passed_over) if progress.passed_over else run.training
    with closing(
        StepBatches(dataset, plan=plan, data_rank=session.groups.data.rank, first_sample=progress.samples)
    ) as stream:
        while progress.step < config.train.train_iters:
            report = run.see(_train_step(run, progress, stream, recent, began))
            before = progress
            progress = replace(
                progress, step=report.step, samples=report.samples, tokens=report.tokens,
                seconds=3600 * report.hours, skipped=report.skipped_steps,
            )  # fmt: skip
            yield report
            if _evaluates(run) and _is_due(report.step, config.train.eval_interval, config.train.train_iters):
                yield _evaluate(run, progress, began)
            saves = run.checkpoints.poll()
            flags = (run.checkpoints.must_stop, _is_bad(report, recent, config), run.alert() is not None)
            stop, cannot_save, is_bad, alerted = session.agree(session.stop_requested, *flags)
            recent.append(report)
            _note_saves(run, saves)
            if cannot_save:
                raise StopRun("a checkpoint failed, and checkpoint.on_error=stop; see timeline.jsonl")
            if alerted:
                _stop_by_alert(run, progress)
            bad_steps = bad_steps + 1 if is_bad else 0
            if is_bad:
                bad_step = _BadStep(before, progress, report.loss)
                _note_bad(run, bad_step)
                if config.train.on_bad_step is OnBadStep.rollback and run.checkpoints.newest() is not None:
                    return bad_step
                if bad_steps >= config.train.max_bad_steps:
                    raise NonFiniteError(
                        f"loss or gradients were not finite, or the loss spiked, for {bad_steps} steps in a row, up to "
                        f"step {report.step} (train.max_bad_steps={config.train.max_bad_steps}); lower train.lr or "
                        f"look at the data of samples {before.samples} to {progress.samples - 1}"
                    )
            if stop:
                _stop(run, progress)
            if run.checkpoints.is_due(progress.step):
                _note_saves(run, run.checkpoints.save(progress))
    return progress


def _train_step(
    run: Run, progress: Progress, stream: StepBatches, recent: Sequence[StepReport], began: float
) -> StepReport:
    trainer, session, config, plan = run.trainer, run.session, run.session.config, run.session.plan
    sequence = config.data.sequence_length
    groups, device = session.groups, session.device
    step = progress.step + 1
    last_state.now("train_batch", step=step)
    start = device.now()
    num_micro_batches = plan.num_micro_batches_at(progress.samples)
    trainer.set_num_micro_batches(num_micro_batches)
    batches = next(stream)[1] if trainer.holds_data else None
    data_time = time.perf_counter() - start
    step_samples = num_micro_batches * plan.micro_batch_size * plan.data_parallel_size
    step_tokens = step_samples * sequence
    tokens = progress.tokens + step_tokens
    lr = learning_rate_at(config, step=step, tokens=tokens, total_tokens=run.total_tokens)
    session.streams.seed_step(seed=config.seed, step=step, data_rank=groups.data.rank, stage=groups.pipeline.rank)
    with run.watch(trainer, step):
        result = trainer.train_batch(batches, lr=lr)
    end = device.now()
    if trainer.holds_data and result.unmasked_tokens == 0:
        samples = f"samples {progress.samples} to {progress.samples + step_samples - 1}"
        run.timeline.add("no token counts", step=step, message=f"warning: no token of {samples} counts: loss 0")
    step_time = end - start
    model_flops = training_flops_per_token(config)
    rate = step_tokens * model_flops / step_time / plan.world_size
    hardware_rate = rate * training_hardware_flops_per_token(config, recompute=plan.recompute) / model_flops
    pace = median([report.step_time_s for report in recent] + [step_time])
    peak, measured = run.rates.peak, run.rates.measured
    saved_step, saved_at = run.checkpoints.saved
    return StepReport(
        step=step,
        train_iters=config.train.train_iters,
        loss=result.loss,
        learning_rate=lr,
        grad_norm=result.grad_norm,
        skipped=result.skipped,
        skipped_steps=progress.skipped + result.skipped,
        loss_scale=result.loss_scale,
        samples=progress.samples + step_samples,
        tokens=tokens,
        flops=float(tokens * model_flops),
        hours=(end - began) / 3600,
        step_time_s=step_time,
        data_time_s=data_time,
        tokens_per_s=step_tokens / step_time,
        unmasked_tokens_per_s=result.unmasked_tokens / step_time,
        tokens_per_s_per_device=step_tokens / step_time / plan.world_size,
        model_flops_per_s_per_device=rate,
        mfu=rate / peak if peak else None,
        hfu=hardware_rate / peak if peak else None,
        mfu_of_measured_rate=rate / measured,
        hfu_of_measured_rate=hardware_rate / measured,
        memory_bytes=device.memory_bytes(),
        peak_memory_bytes=device.peak_memory_bytes(),
        checkpoint_age_steps=step - saved_step,
        checkpoint_age_s=end - saved_at,
        eta_s=pace * (config.train.train_iters - step),
    )


@dataclass(frozen=True)
class _BadStep:
    before: Progress
    after: Progress
    loss: float


def _is_bad(report: StepReport, recent: Sequence[StepReport], config: Config) -> bool:
    """Nothing was updated, the loss is not finite, or it is a spike over at least ten steps' median."""
    if report.skipped or not math.isfinite(report.loss):
        return True
    factor = config.train.spike_factor
    return factor > 0 and len(recent) >= 10 and report.loss > factor * median(one.loss for one in recent)


def _note_bad(run: Run, bad: _BadStep) -> None:
    event = "spike" if math.isfinite(bad.loss) else "not finite"
    samples = [bad.before.samples, bad.after.samples]
    run.timeline.add("bad step", step=bad.after.step, what=event, loss=repr(bad.loss), samples=samples)


def _roll_back(run: Run, bad: _BadStep, rollbacks: Counter[int]) -> Progress:
    """The newest checkpoint's state, with the bad step's samples left out from now on."""
    _note_saves(run, run.checkpoints.finish())
    first, last = (
        passed_over_place(sample, bad.before.passed_over) for sample in (bad.before.samples, bad.after.samples - 1)
    )
    ranges = merged_ranges([*bad.before.passed_over, (first, last + 1)])
    progress = replace(run.checkpoints.load_newest(run.checkpoints.newest_first(), only=False), passed_over=ranges)
    rollbacks[progress.step] += 1
    if rollbacks[progress.step] > run.session.config.train.max_bad_steps:
        raise NonFiniteError(
            f"rolled back to step {progress.step} {rollbacks[progress.step]} times and met a bad step each time "
            f"(train.max_bad_steps={run.session.config.train.max_bad_steps}); lower train.lr or look at the data"
        )
    message = f"rolled back from step {bad.after.step} to {progress.step}; samples {first} to {last} are passed over"
    run.timeline.add("rollback", step=progress.step, message=message, bad_step=bad.after.step, passed_over=ranges)
    return progress


def _stop(run: Run, progress: Progress) -> None:
    saves = run.checkpoints.save(progress, wait=True)
    _note_saves(run, saves)
    if saves[-1].error is not None:
        raise StopRun(f"asked to stop at step {progress.step}, but the checkpoint failed: {saves[-1].error}")
    run.timeline.add("stopped on request", step=progress.step)
    raise StoppedOnRequest(
        f"stopped on request after step {progress.step}, checkpoint saved; the same command with resume=auto goes on"
    )


def _stop_by_alert(run: Run, progress: Progress) -> None:
    alert = broadcast(run.alert())
    saves = alert["action"] == "checkpoint_and_stop"
    _note_saves(run, run.checkpoints.save(progress, wait=True) if saves else run.checkpoints.finish())
    run.timeline.add("stopped by alert", step=progress.step, alert=alert["alert"], slice=alert["slice"])
    raise StoppedByAlert(f"stopped after step {progress.step} by {alert['message']}", run.checkpoints.newest())


def _finish_saves(run: Run, progress: Progress) -> None:
    """Wait for the save in flight. No run is complete without its last checkpoint: StopRun where that failed twice."""
    _note_saves(run, run.checkpoints.finish())
    if run.session.agree(run.checkpoints.last_failed)[0]:
        saves = run.checkpoints.save(progress, wait=True)
        _note_saves(run, saves)
        if saves[-1].error is not None:
            raise StopRun(
                f"all steps are trained, but the last checkpoint failed: {saves[-1].error}; when that is mended, the "
                "same command with resume=auto trains from the checkpoint before it"
            )


def _note_saves(run: Run, saves: Sequence[SaveReport]) -> None:
    for save in saves:
        if save.error is not None:
            goes_on = "" if run.checkpoints.must_stop else ", training goes on"
            message = f"warning: the checkpoint failed{goes_on}: {save.error}"
            run.timeline.add("checkpoint failed", step=save.step, message=message)
            continue
        run.timeline.add("checkpoint", message=save.words, **asdict(save))


def _is_due(step: int, interval: int, last: int) -> bool:
    return step == last or step % interval == 0


def _evaluates(run: Run) -> bool:
    train = run.session.config.train
    return run.validation is not None and train.eval_interval > 0 and train.eval_samples > 0


def _evaluate(run: Run, progress: Progress, began: float) -> EvaluationReport:
    last_state.now("evaluate", step=progress.step)
    plan, groups, config = run.session.plan, run.session.groups, run.session.config
    assert run.validation is not None
    batches = None
    if run.trainer.holds_data:
        batches = evaluation_batches(
            run.validation,
            plan=plan,
            data_rank=groups.data.rank,
            num_samples=config.train.eval_samples,
            micro_batch_multiple=run.trainer.evaluation_multiple,
        )
    loss = run.trainer.evaluate(batches)
    run.timeline.add("evaluation", step=progress.step, loss=loss)
    return EvaluationReport(
        step=progress.step, tokens=progress.tokens, loss=loss, hours=(time.perf_counter() - began) / 3600,
        flops=float(progress.tokens * training_flops_per_token(config)),
    )  # fmt: skip
