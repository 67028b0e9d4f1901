"""Learning rates and samples as pure functions of where the run is, so that a resumed run draws the same curve.

Conventions: `position` counts finished steps (or tokens) *including* the step the rate is for, so the first step has
position 1. Warm-up is linear from peak/warmup to peak. Sources: cosine arXiv:1608.03983, WSD arXiv:2404.06395.
"""

from __future__ import annotations

import math

from conf.schema import Config, LRSchedule
from parallel.plan import ParallelPlan


def learning_rate(
    position: float,
    *,
    schedule: LRSchedule,
    peak: float,
    min_ratio: float,
    warmup: float,
    end: float,
    decay: float | None = None,
) -> float:
    """Learning rate at `position`.

    warmup, end: positions where the rate reaches the peak and its last value. decay: for WSD, the length of the final
    decay (null: a tenth of the run). Beyond `end` the rate stays at peak * min_ratio (constant: at peak).
    """
    if warmup > 0 and position < warmup:
        return peak * position / warmup
    if schedule is LRSchedule.constant:
        return peak
    low = peak * min_ratio
    if schedule is LRSchedule.wsd:
        length = decay if decay is not None else 0.1 * end
        done = (position - (end - length)) / length if length > 0 else float(position >= end)
        return peak - (peak - low) * min(max(done, 0.0), 1.0)
    if position >= end:
        return low if end > warmup else peak
    done = (position - warmup) / (end - warmup)
    if schedule is LRSchedule.linear:
        return peak - (peak - low) * done
    return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * done))


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
