"""The values that travel from the training loop to the sinks, and the names they have in every sink.

The names are the same under every plan. Four of them are x-axes: step, tokens, flops and hours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from telemetry.ranks import RanksReport
from telemetry.trace_overlap import Profiled

AXES = ("step", "tokens", "flops", "hours")
ASIDE = (*AXES, "train_iters", "instructions", "ranks", "profiled")


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, as every sink sees it. Rates are per second of step time (data loading included)."""

    step: int  # finished optimizer steps, from 1
    train_iters: int  # steps of the whole run
    loss: float  # mean over the global batch's unmasked tokens
    learning_rate: float  # the one applied in this step
    grad_norm: float  # global, before clipping
    skipped: bool  # nothing was updated: a gradient was not finite
    skipped_steps: int  # since the run began
    loss_scale: float | None  # in fp16
    samples: int  # samples seen since the run began
    tokens: int  # token slots seen since the run began
    flops: float  # model FLOPs spent since the run began, recomputation excluded
    hours: float  # trained since the run began: evaluations and saves included, time between its starts not
    step_time_s: float
    data_time_s: float  # part of step_time_s spent waiting for batches
    tokens_per_s: float  # token slots, over all devices
    unmasked_tokens_per_s: float  # those that count in the loss, over all devices
    tokens_per_s_per_device: float
    model_flops_per_s_per_device: float  # recomputation excluded
    mfu: float | None  # model FLOP/s over the data-sheet peak; None where no peak is known
    hfu: float | None  # the same, recomputation included
    mfu_of_measured_rate: float | None  # model FLOP/s over the matrix rate measured on this device at the start
    hfu_of_measured_rate: float | None  # the same, recomputation included
    memory_bytes: int  # of rank 0 after the step: allocated tensors on CUDA, resident set of the process on CPU
    peak_memory_bytes: int  # the largest so far
    checkpoint_age_steps: int  # since the newest checkpoint, or the start
    checkpoint_age_s: float
    eta_s: float  # seconds to the last step at the recent pace
    telemetry_time_s: float = 0.0  # beside the steps: to read this one's clocks, to write the one before to all sinks
    instructions: Mapping[str, float] = field(default_factory=dict)  # seconds of rank 0 by the engine's instruction
    ranks: RanksReport | None = None  # what all ranks saw, where they told
    profiled: Profiled | None = None  # where this was the last step of a profiled window

    @property
    def data_share(self) -> float:
        return self.data_time_s / self.step_time_s


@dataclass(frozen=True)
class EvaluationReport:
    """Validation loss at a training step."""

    step: int
    tokens: int
    flops: float
    hours: float
    loss: float  # mean over the validation tokens


def as_metrics(report: StepReport | EvaluationReport) -> dict[str, Any]:
    """Flat names shared by all sinks: the axes, train/loss, train/step_time_s, ..., instruction/ForwardPass_s,
    pipeline/bubble/stage0, ..., validation/loss.
    """
    prefix = "train" if isinstance(report, StepReport) else "validation"
    values = {one.name: getattr(report, one.name) for one in fields(report) if one.name not in ASIDE}
    found: dict[str, Any] = {name: getattr(report, name) for name in AXES}
    found |= {f"{prefix}/{name}": value for name, value in values.items() if value is not None}
    if isinstance(report, StepReport):
        found["train/data_share"] = report.data_share
        found |= {f"instruction/{name}_s": seconds for name, seconds in report.instructions.items()}
        found |= report.ranks.as_metrics() if report.ranks is not None else {}
        if report.profiled is not None and report.profiled.overlap_share is not None:
            found["communication/overlap_share"] = report.profiled.overlap_share
    return found
