"""DeepSpeed's plain engine around the sequential model: ZeRO 2 and 3, with tensor parallelism through an mpu,
without pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed

from conf.schema import Config
from corpus.batches import Batch
from engine import last_state
from engine.deepspeed_config import deepspeed_config
from engine.distributed import muted
from engine.instruction_clock import RECOMPUTES, InstructionClock
from engine.loss import TokenLoss, count_unmasked, loss_scale
from engine.optimizer import build_optimizer, parameter_groups
from engine.step import StepResult, applied_loss_scale, model_inputs, set_learning_rate
from model.layers import LayerSpec, Transformer
from model.tensor_parallel.random import RandomStreams
from parallel.architecture import positions_travel
from parallel.groups import Groups
from parallel.plan import ParallelPlan


@dataclass(frozen=True)
class ModelParallelUnit:
    """What DeepSpeed calls an mpu: who shares a model copy with this rank, and who holds the same part of another."""

    groups: Groups
    model_group: torch.distributed.ProcessGroup
    data_group: torch.distributed.ProcessGroup

    def get_model_parallel_rank(self) -> int:
        return self.groups.tensor.rank

    def get_model_parallel_world_size(self) -> int:
        return self.groups.tensor.size

    def get_model_parallel_group(self) -> torch.distributed.ProcessGroup:
        return self.model_group

    def get_data_parallel_rank(self) -> int:
        return self.groups.data.rank

    def get_data_parallel_world_size(self) -> int:
        return self.groups.data.size

    def get_data_parallel_group(self) -> torch.distributed.ProcessGroup:
        return self.data_group


def _model_parallel_unit(plan: ParallelPlan, groups: Groups) -> ModelParallelUnit | None:
    """None without tensor parallelism: DeepSpeed then takes the world for the data axis."""
    if groups.tensor.size == 1:
        return None
    data_group = groups.data.process_group
    if data_group is None:  # DeepSpeed wants a group of one rank where the data axis is that short
        alone = [torch.distributed.new_group([rank]) for rank in range(plan.world_size)]
        data_group = alone[torch.distributed.get_rank()]
    assert groups.tensor.process_group is not None
    return ModelParallelUnit(groups, groups.tensor.process_group, data_group)


class ZeroTrainer:
    """One optimizer step, one evaluation, one forward for logits, over a DeepSpeedEngine."""

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        *,
        config: Config,
        plan: ParallelPlan,
        groups: Groups,
        streams: RandomStreams,
        num_micro_batches: int,
        device: torch.device,
    ):
        self.plan = plan
        self.groups = groups
        self.with_positions = positions_travel(config)
        self.loss_fn = TokenLoss(tensor=groups.tensor, vocab_size=config.model.vocab_size)
        model = Transformer(
            specs, recompute=plan.recompute, recompute_interval=plan.recompute_interval, streams=streams
        ).to(device)
        optimizer = build_optimizer(
            parameter_groups(model.parameters(), config.optimizer), config.optimizer, lr=config.train.lr
        )
        with muted():
            self.engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                mpu=_model_parallel_unit(plan, groups),
                config=deepspeed_config(config, plan, num_micro_batches=num_micro_batches),
            )
        self.module = self.engine.module
        self.clock = InstructionClock(groups.pipeline, device)
        streams.around_recompute = lambda: self.clock.span(RECOMPUTES)

    @property
    def holds_data(self) -> bool:
        return True

    @property
    def evaluation_multiple(self) -> int:
        return 1

    @property
    def loss_rank(self) -> int:
        return 0

    def train_batch(self, batches: Sequence[Batch] | None, *, lr: float) -> StepResult:
        """One optimizer step over this data rank's micro-batches."""
        assert batches is not None and len(batches) == self.engine.gradient_accumulation_steps()
        set_learning_rate(self.engine.optimizer, lr)
        skipped_before = self.engine.skipped_steps
        scale, unmasked = self._scale(batches)
        total = torch.zeros((), device=self.engine.device)
        self.module.train()
        for number, batch in enumerate(batches):
            last_state.now("forward", micro_batch=number)
            with self.clock.span("ForwardPass"):
                loss = self._loss(batch, scale)
            last_state.now("backward", micro_batch=number)
            with self.clock.span("BackwardPass"):
                self.engine.backward(loss)
            last_state.now("step", micro_batch=number)
            with self.clock.span("OptimizerStep"):
                self.engine.step()
            total += loss.detach()
        last_state.now("end of train_batch")
        norm = self.engine.get_global_grad_norm()
        return StepResult(
            loss=self._mean(total, len(batches)), grad_norm=math.nan if norm is None else float(norm),
            skipped=self.engine.skipped_steps > skipped_before,
            unmasked_tokens=unmasked, loss_scale=applied_loss_scale(self.engine),
        )  # fmt: skip

    def evaluate(self, batches: Sequence[Batch] | None) -> float:
        """Mean loss over the unmasked tokens of all data ranks' batches; the same number on every rank."""
        assert batches is not None
        self.module.eval()
        scale, _ = self._scale(batches)
        with torch.no_grad():
            losses = []
            for number, batch in enumerate(batches):
                last_state.now("evaluate", micro_batch=number)
                losses.append(self._loss(batch, scale))
            total = torch.stack(losses).sum()
        self.module.train()
        return self._mean(total, len(batches))

    def logits(self, batch: Batch) -> torch.Tensor | None:
        """This rank's vocabulary shard of the logits [B, S, V/T]."""
        self.module.eval()
        with torch.no_grad():
            logits = self.engine(self._inputs(batch))
        self.module.train()
        return logits

    def set_num_micro_batches(self, count: int) -> None:
        if count != self.engine.gradient_accumulation_steps():
            plan = self.plan
            self.engine.set_train_batch_size(count * plan.micro_batch_size * plan.data_parallel_size)

    def _inputs(self, batch: Batch) -> Any:
        inputs = model_inputs(batch, with_positions=self.with_positions)
        device = self.engine.device
        return tuple(t.to(device) for t in inputs) if isinstance(inputs, tuple) else inputs.to(device)

    def _loss(self, batch: Batch, scale: torch.Tensor) -> torch.Tensor:
        return self.loss_fn(self.engine(self._inputs(batch)), (batch.labels_BS.to(self.engine.device), scale))

    def _scale(self, batches: Sequence[Batch]) -> tuple[torch.Tensor, int]:
        """The factor of every token loss, and the unmasked tokens of the global batch."""
        unmasked = count_unmasked(batches, data=self.groups.data, device=self.engine.device)
        scale = loss_scale(unmasked, num_micro_batches=len(batches), data=self.groups.data)
        return scale.to(self.engine.device), unmasked

    def _mean(self, total: torch.Tensor, count: int) -> float:
        """Mean over micro-batches and data ranks of the scaled losses: the token mean."""
        total = total / count
        if self.groups.data.size > 1:
            torch.distributed.all_reduce(total, group=self.groups.data.process_group)
        return float(total) / self.groups.data.size
