"""The value that travels from the training loop to the sinks, and the names it has in every sink."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, as every sink sees it. Rates are per second of step time (data loading included)."""

    step: int  # finished optimizer steps, from 1
    train_iters: int  # steps of the whole run
    loss: float  # mean over the global batch's unmasked tokens
    learning_rate: float  # the one applied in this step
    grad_norm: float  # global, before clipping
    skipped: bool  # nothing was updated: a gradient was not finite
    samples: int  # samples seen since the run began
    tokens: int  # token slots seen since the run began
    step_time_s: float
    data_time_s: float  # part of step_time_s spent waiting for batches
    tokens_per_s: float  # token slots, over all devices
    unmasked_tokens_per_s: float  # those that count in the loss, over all devices
    tokens_per_s_per_device: float
    model_flops_per_s_per_device: float  # recomputation excluded
    mfu: float | None  # model FLOP/s over the data-sheet peak; None where no peak is known
    mfu_of_measured_rate: float | None  # model FLOP/s over the matrix rate measured on this device at the start
    peak_memory_bytes: int  # of rank 0: allocated tensors on CUDA, resident set of the process on CPU
    eta_s: float  # seconds to the last step at the recent pace


@dataclass(frozen=True)
class EvaluationReport:
    """Validation loss at a training step."""

    step: int
    tokens: int
    loss: float  # mean over the validation tokens


def as_metrics(report: StepReport | EvaluationReport) -> dict[str, Any]:
    """Flat names shared by metrics.jsonl and wandb: train/loss, train/step_time_s, ..., validation/loss, step,
    tokens.
    """
    prefix = "train" if isinstance(report, StepReport) else "validation"
    values = asdict(report)
    shared = {name: values.pop(name) for name in ("step", "tokens")}
    values.pop("train_iters", None)
    return shared | {f"{prefix}/{name}": value for name, value in values.items() if value is not None}
