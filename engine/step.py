"""What the two engines share: the result of a step, and micro-batches as they take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from corpus.batches import Batch
from engine.instruction_clock import InstructionClock


@dataclass(frozen=True)
class StepResult:
    """loss: mean over the global batch's unmasked tokens, before the update. grad_norm: global, before clipping.
    skipped: nothing was updated because a gradient was not finite. unmasked_tokens: of the global batch; 0 on ranks
    that hold no data. loss_scale: fp16's, after the step; None in other formats."""

    loss: float
    grad_norm: float
    skipped: bool
    unmasked_tokens: int
    loss_scale: float | None = None


class Trainer(Protocol):
    """The one signature over PipelineEngine and DeepSpeedEngine. Every method is called on all ranks alike."""

    engine: Any
    clock: InstructionClock

    @property
    def module(self) -> torch.nn.Module: ...
    @property
    def holds_data(self) -> bool: ...
    @property
    def evaluation_multiple(self) -> int: ...
    @property
    def loss_rank(self) -> int: ...
    def train_batch(self, batches: Sequence[Batch] | None, *, lr: float) -> StepResult: ...
    def evaluate(self, batches: Sequence[Batch] | None) -> float: ...
    def logits(self, batch: Batch) -> torch.Tensor | None: ...
    def set_num_micro_batches(self, count: int) -> None: ...


def set_learning_rate(optimizer: Any, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def applied_loss_scale(engine: Any) -> float | None:
    """What the loss is multiplied with before backward, in fp16."""
    return float(engine.optimizer.loss_scale) if engine.fp16_enabled() else None


def model_inputs(batch: Batch, *, with_positions: bool) -> Any:
    """What the first layer takes: (tokens, positions) where documents are masked apart, else tokens."""
    return (batch.tokens_BS, batch.positions_BS) if with_positions else batch.tokens_BS


def split_batch(batch: Batch, scale: torch.Tensor, *, with_positions: bool) -> tuple[Any, Any]:
    """(inputs of the first layer, inputs of the loss)."""
    return model_inputs(batch, with_positions=with_positions), (batch.labels_BS, scale)
