"""The training loop: batches in, reports out. Everything it decides is a pure function of config, plan and step.

Not here: how a step is computed (engine/pipeline.py, engine/zero.py) and who reads the reports (telemetry/).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from statistics import median

from conf.schema import Config
from corpus.batches import StepBatches, evaluation_batches
from corpus.dataset import Dataset
from engine.failure import StopRun
from engine.schedules import learning_rate
from engine.session import Rates, Session
from engine.step import Trainer
from parallel.flops import model_flops_per_token
from parallel.plan import ParallelPlan
from telemetry.report import EvaluationReport, StepReport


class NonFiniteError(StopRun):
    """Too many steps in a row had a non-finite loss or gradient."""


def learning_rate_at(config: Config, *, step: int, tokens: int, total_tokens: int) -> float:
    """Rate for the step that ends with `step` steps and `tokens` tokens done."""
    train = config.train
    in_tokens = train.lr_unit == "tokens"
    wsd = train.lr_schedule.value == "wsd"
    end = total_tokens if in_tokens else train.train_iters
    return learning_rate(
        tokens if in_tokens else step,
        schedule=train.lr_schedule,
        peak=train.lr,
        min_ratio=train.min_lr_ratio,
        warmup=train.lr_warmup,
        end=end if wsd or train.lr_decay is None else train.lr_decay,
        decay=train.lr_decay if wsd else None,
    )


def samples_after(plan: ParallelPlan, steps: int) -> int:
    """Samples seen after `steps` optimizer steps, batch ramp-up included."""
    samples = 0
    for _ in range(steps):
        samples += plan.num_micro_batches_at(samples) * plan.micro_batch_size * plan.data_parallel_size
    return samples


def train(
    trainer: Trainer, session: Session, *, training: Dataset, validation: Dataset | None, rates: Rates
) -> Iterator[StepReport | EvaluationReport]:
    """Train for `train.train_iters` steps, yielding a report a step and one an evaluation. Called on all ranks alike.

    Raises NonFiniteError, on every rank at the same step, after `train.max_bad_steps` skipped steps in a row.
    """
    config, plan, groups, device = session.config, session.plan, session.groups, session.device
    sequence = config.data.sequence_length
    flops_per_token = model_flops_per_token(config.model, sequence)
    total_tokens = samples_after(plan, config.train.train_iters) * sequence
    samples, bad_steps = 0, 0
    recent: deque[float] = deque(maxlen=50)
    evaluates = config.train.eval_interval > 0 and config.train.eval_samples > 0
    if validation is not None and evaluates:
        yield _evaluate(trainer, session, validation, step=0, tokens=0)
    with closing(StepBatches(training, plan=plan, data_rank=groups.data.rank)) as stream:
        for step in range(1, config.train.train_iters + 1):
            start = device.now()
            num_micro_batches = plan.num_micro_batches_at(samples)
            trainer.set_num_micro_batches(num_micro_batches)
            batches = next(stream)[1] if trainer.holds_data else None
            data_time = time.perf_counter() - start
            samples += num_micro_batches * plan.micro_batch_size * plan.data_parallel_size
            tokens = samples * sequence
            lr = learning_rate_at(config, step=step, tokens=tokens, total_tokens=total_tokens)
            session.streams.seed_step(
                seed=config.seed, step=step, data_rank=groups.data.rank, stage=groups.pipeline.rank
            )
            result = trainer.train_batch(batches, lr=lr)
            step_time = device.now() - start
            recent.append(step_time)
            step_tokens = num_micro_batches * plan.micro_batch_size * plan.data_parallel_size * sequence
            rate = step_tokens * flops_per_token / step_time / plan.world_size
            yield StepReport(
                step=step,
                train_iters=config.train.train_iters,
                loss=result.loss,
                learning_rate=lr,
                grad_norm=result.grad_norm,
                skipped=result.skipped,
                samples=samples,
                tokens=tokens,
                step_time_s=step_time,
                data_time_s=data_time,
                tokens_per_s=step_tokens / step_time,
                unmasked_tokens_per_s=result.unmasked_tokens / step_time,
                tokens_per_s_per_device=step_tokens / step_time / plan.world_size,
                model_flops_per_s_per_device=rate,
                mfu=rate / rates.peak if rates.peak else None,
                mfu_of_measured_rate=rate / rates.measured,
                peak_memory_bytes=device.peak_memory_bytes(),
                eta_s=median(recent) * (config.train.train_iters - step),
            )
            bad_steps = bad_steps + 1 if result.skipped or not math.isfinite(result.loss) else 0
            if bad_steps >= config.train.max_bad_steps:
                raise NonFiniteError(
                    f"loss or gradients were not finite for {bad_steps} steps in a row, up to step {step} "
                    f"(train.max_bad_steps={config.train.max_bad_steps}); lower train.lr or look at the data "
                    f"of samples {samples - step_tokens // sequence} to {samples - 1}"
                )
            last = step == config.train.train_iters
            if validation is not None and evaluates and (last or step % config.train.eval_interval == 0):
                yield _evaluate(trainer, session, validation, step=step, tokens=tokens)


def _evaluate(trainer: Trainer, session: Session, validation: Dataset, *, step: int, tokens: int) -> EvaluationReport:
    plan, groups = session.plan, session.groups
    batches = None
    if trainer.holds_data:
        batches = evaluation_batches(
            validation,
            plan=plan,
            data_rank=groups.data.rank,
            num_samples=session.config.train.eval_samples,
            micro_batch_multiple=2 * groups.pipeline.size if plan.schedule == "dualpipev" else 1,
        )
    return EvaluationReport(step=step, tokens=tokens, loss=trainer.evaluate(batches))
