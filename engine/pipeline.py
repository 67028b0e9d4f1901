"""DeepSpeed's pipeline engine around our layers: pp >= 1, ZeRO 0 and 1, schedules 1f1b, eager1f1b and dualpipev.

What is ours here: stages come from the plan, recomputation from `model.layers.run_layers` (DeepSpeed picks layers by
class name), and in plain fp32 without ZeRO the gradient norm, clipping and the skipping of non-finite steps.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed
from deepspeed.pipe import LayerSpec as DeepSpeedLayerSpec
from deepspeed.pipe import PipelineModule
from deepspeed.pipe import TiedLayerSpec as DeepSpeedTiedLayerSpec
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.topology import ProcessTopology

from conf.schema import Config, DType
from corpus.batches import Batch
from engine import last_state
from engine.deepspeed_config import deepspeed_config
from engine.distributed import muted
from engine.eager_schedule import EagerExchange
from engine.gradients import clip_factor, global_norm
from engine.instruction_clock import RECOMPUTES, InstructionClock
from engine.loss import TokenLoss, count_unmasked, loss_scale
from engine.optimizer import build_optimizer, parameter_groups
from engine.step import StepResult, applied_loss_scale, set_learning_rate, split_batch
from model.layers import LayerSpec, run_layers
from model.tensor_parallel.random import RandomStreams
from model.tensor_parallel.weight_gradients import WeightGradients
from parallel.architecture import positions_travel
from parallel.groups import Groups
from parallel.plan import ParallelPlan


class _Layer(DeepSpeedLayerSpec):
    """A layer of ours as DeepSpeed wants it: built on the stage that owns it."""

    def __init__(self, spec: LayerSpec):
        super().__init__(torch.nn.Module)
        self.spec = spec

    def build(self, log: bool = False) -> torch.nn.Module:
        return self.spec.build()


class _TiedLayer(DeepSpeedTiedLayerSpec):
    """A layer whose word table is shared with another stage's."""

    def __init__(self, spec: LayerSpec):
        super().__init__(
            spec.tied_key,
            torch.nn.Module,
            forward_fn=spec.forward_fn,
            tied_weight_attr=["word_embeddings.weight"],
        )
        self.spec = spec

    def build(self, log: bool = False) -> torch.nn.Module:
        return self.spec.build()


class PlannedPipeline(PipelineModule):
    """A PipelineModule cut where the plan says."""

    def __init__(self, specs: Sequence[LayerSpec], *, plan: ParallelPlan, streams: RandomStreams, loss_fn: TokenLoss):
        self.plan = plan
        self.streams = streams
        axes = [("model" if axis == "tensor" else axis) for axis in plan.order]  # DeepSpeed's name for it
        topology = ProcessTopology(axes=axes, dims=[plan.topology.size(axis) for axis in plan.order])
        layers = [_TiedLayer(spec) if spec.tied_key else _Layer(spec) for spec in specs]
        super().__init__(layers=layers, topology=topology, loss_fn=loss_fn, partition_method="uniform")

    def _partition_layers(self, method: str = "uniform") -> None:
        stages = self.plan.stage_layers
        assert len(stages) == self.num_stages and stages[-1][1] == self._num_layers
        self.parts = [first for first, _ in stages] + [self._num_layers]
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    def forward(self, inputs: Any) -> Any:
        return run_layers(
            self.forward_funcs,
            inputs,
            recompute=self.plan.recompute,
            recompute_interval=self.plan.recompute_interval,
            streams=self.streams,
        )

    def get_tied_weights_and_groups(self) -> list[tuple[torch.nn.Parameter, Any]]:
        """A frozen table has no gradient to sum over its copies."""
        return [(weight, group) for weight, group in super().get_tied_weights_and_groups() if weight.requires_grad]


class PlannedDualPipe(DualPipeVModule, PlannedPipeline):
    """The same in 2 * pp stages, two a rank (the order of bases lets DualPipeV double them first)."""


class PipelineTrainer:
    """One optimizer step, one evaluation, one forward for logits, over a DeepSpeed PipelineEngine."""

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        *,
        config: Config,
        plan: ParallelPlan,
        groups: Groups,
        streams: RandomStreams,
        num_micro_batches: int,
    ):
        self.plan = plan
        self.groups = groups
        self.with_positions = positions_travel(config)
        self.streams = streams
        self.clip_grad = config.optimizer.clip_grad
        loss_fn = TokenLoss(tensor=groups.tensor, vocab_size=config.model.vocab_size)
        kind = PlannedDualPipe if plan.schedule == "dualpipev" else PlannedPipeline
        with muted():
            module = kind(specs, plan=plan, streams=streams, loss_fn=loss_fn)
            optimizer = build_optimizer(
                parameter_groups(module.parameters(), config.optimizer), config.optimizer, lr=config.train.lr
            )
            self.engine, *_ = deepspeed.initialize(
                model=module,
                optimizer=optimizer,
                config=deepspeed_config(config, plan, num_micro_batches=num_micro_batches),
            )
        self.module = module
        self.exchange: EagerExchange | None = None
        if plan.schedule == "eager1f1b" and groups.pipeline.size > 1:
            self.exchange = EagerExchange(self.engine, groups.pipeline, lines=plan.topology.lines("pipe"))
        self.clock = InstructionClock(groups.pipeline, torch.device(self.engine.device))
        streams.around_recompute = lambda: self.clock.span(RECOMPUTES)
        self.engine._INSTRUCTION_MAP = {
            kind: _noted(kind, run, self.clock) for kind, run in self.engine._INSTRUCTION_MAP.items()
        }
        self.owns_norm = plan.zero_stage == 0 and config.precision.dtype is DType.fp32
        if self.owns_norm:
            self.engine.allreduce_gradients = self._sum_gradients
            later = self.exchange is not None and groups.pipeline.rank > 0
            weight_gradients = WeightGradients(module.parameters(), later=later)
            if self.exchange is not None:
                self.exchange.weight_gradients = weight_gradients
            self.engine._take_model_step = types.MethodType(_guarded_model_step(self), self.engine)

    @property
    def holds_data(self) -> bool:
        """Whether this rank reads batches: the first and the last stage."""
        stage = self.groups.pipeline.rank
        if self.plan.schedule == "dualpipev":
            return stage == 0
        return stage in (0, self.groups.pipeline.size - 1)

    def train_batch(self, batches: Sequence[Batch] | None, *, lr: float) -> StepResult:
        """One optimizer step over this data rank's micro-batches (None on ranks that hold no data)."""
        engine = self.engine
        count = engine.micro_batches
        assert batches is None or len(batches) == count, "set_num_micro_batches comes first"
        set_learning_rate(engine.optimizer, lr)
        skipped_before = engine.skipped_steps
        stream, unmasked = self._stream(batches, count)
        loss = engine.train_batch(data_iter=stream)
        self._finish_sends()
        last_state.now("end of train_batch")
        norm = engine.get_global_grad_norm()
        return StepResult(
            loss=float(loss), grad_norm=math.nan if norm is None else float(norm),
            skipped=engine.skipped_steps > skipped_before,
            unmasked_tokens=unmasked, loss_scale=applied_loss_scale(engine),
        )  # fmt: skip

    def evaluate(self, batches: Sequence[Batch] | None) -> float:
        """Mean loss over the unmasked tokens of all data ranks' batches; the same number on every rank."""
        count = self._agree_on_count(batches)
        stream, _ = self._stream(batches, count)
        parts = count // self.evaluation_multiple if self.plan.schedule == "dualpipev" else 1
        losses = [float(self.engine.eval_batch(stream, num_micro_batches=count // parts)) for _ in range(parts)]
        self._finish_sends()
        self.module.train()
        return sum(losses) / parts

    def logits(self, batch: Batch) -> torch.Tensor | None:
        """This rank's vocabulary shard of the logits [B, S, V/T] on the loss stage, None elsewhere."""
        count = self.evaluation_multiple
        stream, _ = self._stream([batch] * count if self.holds_data else None, count)
        _, logits = self.engine.eval_batch(stream, return_logits=True, num_micro_batches=count)
        self._finish_sends()
        self.module.train()
        return logits

    @property
    def evaluation_multiple(self) -> int:
        """Of so many micro-batches an evaluation must be made: DualPipeV's buffers are those of a training step."""
        return self.engine.micro_batches if self.plan.schedule == "dualpipev" else 1

    @property
    def loss_rank(self) -> int:
        """Global rank of the first tensor rank on this data rank's loss stage."""
        stage = 0 if self.plan.schedule == "dualpipev" else self.groups.pipeline.size - 1
        return self.plan.topology.rank(pp=stage, dp=0, tp=0)

    def set_num_micro_batches(self, count: int) -> None:
        """Change the number of micro-batches from the next step on (batch ramp-up); on every rank alike."""
        if count != self.engine.micro_batches:
            plan = self.plan
            self.engine.set_train_batch_size(count * plan.micro_batch_size * plan.data_parallel_size)

    def _finish_sends(self) -> None:
        if self.exchange is not None:
            last_state.now("sends to be taken", waits=True)
            self.exchange.finish()

    def _sum_gradients(self, bucket_size: int | None = None) -> None:
        """Sum over the data axis, in place (DeepSpeed copies all gradients to a flat buffer, averages, copies back).

        The average's division is part of the optimizer's scaling.
        """
        if self.groups.data.size > 1:
            group = self.groups.data.process_group
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
            for work in [torch.distributed.all_reduce(grad, group=group, async_op=True) for grad in gradients]:
                work.wait()

    def _agree_on_count(self, batches: Sequence[Batch] | None) -> int:
        """Number of micro-batches, known to the ranks that hold data, on every rank of the pipeline."""
        count = torch.tensor(len(batches) if batches is not None else 0, device=self.engine.device)
        if self.groups.pipeline.size > 1:
            torch.distributed.all_reduce(
                count, op=torch.distributed.ReduceOp.MAX, group=self.groups.pipeline.process_group
            )
        return int(count)

    def _stream(self, batches: Sequence[Batch] | None, count: int) -> tuple[Any, int]:
        """The iterator that DeepSpeed draws ((tokens, positions), (labels, scale)) from, and the unmasked tokens."""
        if batches is None:
            return None, 0
        data = self.groups.data
        unmasked = count_unmasked(batches, data=data, device=self.engine.device)
        scale = loss_scale(unmasked, num_micro_batches=count, data=data)
        return iter([split_batch(batch, scale, with_positions=self.with_positions) for batch in batches]), unmasked


def _noted(kind: type, run: Callable[..., None], clock: InstructionClock) -> Callable[..., None]:
    """The instruction, noted as this rank's last state before it runs, and timed while the clock is on."""
    name = kind.__name__
    waits = name.startswith(("Send", "Recv", "Reduce", "Commit"))

    def run_noted(engine: Any, **named: Any) -> None:
        last_state.now(name, waits=waits, **named)
        clock.run(name, lambda: run(engine, **named))

    return run_noted


def _guarded_model_step(trainer: PipelineTrainer) -> Any:
    """DeepSpeed's optimizer step behind the true global norm: clipped by it, skipped where it is not finite."""

    def take_model_step(engine: Any, lr_kwargs: Any) -> None:
        parameters = [p for p in engine.module.parameters() if p.grad is not None]
        model_group = (
            engine.mpu.get_model_parallel_group()
            if trainer.groups.tensor.size * trainer.groups.pipeline.size > 1
            else None
        )
        ranks = trainer.groups.data.size
        norm = float(global_norm(parameters, tensor=trainer.groups.tensor, model_group=model_group)) / ranks
        engine._global_grad_norm = norm
        if math.isfinite(norm):
            # The fused kernel divides each gradient as it reads it: averaging and clipping cost no pass of their own.
            divisor = ranks / clip_factor(norm, max_norm=trainer.clip_grad)
            engine.optimizer.grad_scale = torch.tensor(divisor, device=engine.device)
            type(engine)._take_model_step(engine, lr_kwargs)
        else:
            engine.zero_grad()
            engine.skipped_steps += 1
            engine.global_steps += 1
            engine.global_samples += engine.train_batch_size()

    return take_model_step
