"""One rank of any plan without its machines: build it, run one micro-batch forward and backward, and count.

On the meta device with torch's fake process group (`engine.meta_rank`), so a rank of thousands runs here in seconds.
Counted are parameters, what autograd keeps for backward by kind of layer, and every collective; beside each stands
what the ledgers (`parallel.memory`, `parallel.communication`) say of it. Not here: time, optimizer states, and what
runs once a step (the data axis, tied tables).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from conf.schema import Config
from engine.loss import TokenLoss
from engine.meta_rank import META, Call, CountCollectives, MetaStage, cuda_kernels, send
from engine.session import DTYPES
from engine.tensor_bytes import HeldActivations
from model.adapters import with_adapters
from model.layers import build_layer_specs
from model.tensor_parallel.random import RandomStreams
from parallel.activations import Kinds, micro_batch
from parallel.architecture import positions_travel
from parallel.communication import ledger as communication_ledger
from parallel.groups import AxisGroup
from parallel.plan import ParallelPlan
from parallel.stage_values import stage_parameters
from parallel.states import StateBytes
from telemetry.tables import size, table


@dataclass(frozen=True)
class DryRun:
    """Counted on one rank for one micro-batch, and predicted. Activations in bytes; calls of each collective."""

    rank: int
    coordinate: tuple[int, int, int]  # pipeline, data, tensor
    stages: tuple[tuple[int, int], ...]  # (first, last + 1) of the ordered layer list
    parameter_bytes: int
    activations: Kinds
    collectives: dict[Call, int]
    predicted_parameter_bytes: int
    predicted_activations: Kinds
    predicted_collectives: dict[Call, int]

    @property
    def agrees(self) -> bool:
        """Whether every number is the ledgers'."""
        return (
            self.parameter_bytes == self.predicted_parameter_bytes
            and self.activations == self.predicted_activations
            and self.collectives == self.predicted_collectives
        )

    def report(self) -> str:
        """Both columns, as text."""
        layers = ", ".join(f"{first} to {last - 1}" for first, last in self.stages)
        pipe, data, tensor = self.coordinate
        rows = [("parameters", size(self.parameter_bytes), size(self.predicted_parameter_bytes))]
        for name, counted, predicted in zip(Kinds._fields, self.activations, self.predicted_activations, strict=True):
            if counted or predicted:
                rows.append((f"kept: {name.replace('_', ' ')}", size(counted), size(predicted)))
        rows.append(("kept, all", size(sum(self.activations)), size(sum(self.predicted_activations))))
        calls = [
            (axis, phase, operation, str(ranks), size(number_of_bytes), str(counted), str(predicted))
            for (axis, phase, operation, ranks, number_of_bytes), counted, predicted in self._calls()
        ]
        return "\n".join(
            [
                f"rank {self.rank}: pipeline {pipe}, data {data}, tensor {tensor}; layers {layers}; one micro-batch",
                table(("bytes", "counted", "ledger"), rows),
                "",
                table(("axis", "phase", "collective", "ranks", "bytes", "counted", "ledger"), calls),
                "",
                "not run: the data axis (ZeRO's partitions and collectives) and the optimizer",
                "counted and ledger agree" if self.agrees else "counted and ledger DIFFER",
            ]
        )

    def _calls(self) -> list[tuple[Call, int, int]]:
        keys = sorted(self.collectives.keys() | self.predicted_collectives.keys(), key=str)
        return [(key, self.collectives.get(key, 0), self.predicted_collectives.get(key, 0)) for key in keys]


def dry_run(config: Config, plan: ParallelPlan, rank: int) -> DryRun:
    """Build and run global rank `rank`. Opens torch.distributed, so no process group may be open."""
    coordinate = plan.coordinate(rank)
    assert not dist.is_initialized(), "a dry run opens a process group of its own"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
    try:
        axes = {axis: _open(plan, rank, axis) for axis in ("tensor", "pipe")}
        with torch.random.fork_rng(devices=[]):
            stages = _build(config, plan, coordinate[0], axes["tensor"])
            activations, collectives = _Run(config, plan, axes, stages).count()
    finally:
        dist.destroy_process_group()
    parameters = {id(p): p for stage in stages for p in stage.parameters()}.values()
    element = StateBytes.of(config.precision.dtype)
    return DryRun(
        rank=rank,
        coordinate=coordinate,
        stages=tuple(plan.stage_layers[stage] for stage in plan.stages_of(coordinate[0])),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        activations=activations,
        collectives=collectives,
        predicted_parameter_bytes=stage_parameters(config, plan, coordinate[0]) * element,
        predicted_activations=_predicted_activations(config, plan, coordinate[0]),
        predicted_collectives=_predicted_collectives(config, plan, coordinate[0]),
    )


def _open(plan: ParallelPlan, rank: int, axis: str) -> AxisGroup:
    """This rank's line only: the other ranks do not exist."""
    ranks = plan.topology.group_of(rank, axis)
    group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
    return AxisGroup(axis, ranks.index(rank), len(ranks), ranks, group)


def _build(config: Config, plan: ParallelPlan, pp_rank: int, tensor: AxisGroup) -> list[MetaStage]:
    """The rank's stage, or two of them under dualpipev."""
    streams = RandomStreams(tensor_rank=tensor.rank)
    specs = build_layer_specs(
        config.model,
        tensor=tensor,
        streams=streams,
        padded_vocab_size=plan.padded_vocab_size,
        sequence_parallel=plan.sequence_parallel,
        recompute=plan.recompute,
        mask_documents=config.data.mask_documents,
        seed=config.seed,
    )
    if config.lora.rank > 0:
        specs = with_adapters(
            specs,
            model=config.model,
            lora=config.lora,
            tensor=tensor,
            streams=streams,
            sequence_parallel=plan.sequence_parallel,
            seed=config.seed,
        )
    shared: dict[str, torch.nn.Module] = {}
    bounds = [plan.stage_layers[stage] for stage in plan.stages_of(pp_rank)]
    dtype = DTYPES[config.precision.dtype]
    return [MetaStage(specs[low:high], dtype=dtype, streams=streams, shared=shared) for low, high in bounds]


class _Run:
    """One micro-batch through a rank's stages, forward in order and backward in reverse."""

    def __init__(self, config: Config, plan: ParallelPlan, axes: dict[str, AxisGroup], stages: list[MetaStage]) -> None:
        self.config, self.plan, self.axes, self.stages = config, plan, axes, stages
        self.numbers = plan.stages_of(axes["pipe"].rank)
        self.held = HeldActivations([p for stage in stages for p in stage.parameters()])
        self.calls = CountCollectives(axes)
        self.shape = plan.micro_batch_size, config.data.sequence_length

    def count(self) -> tuple[Kinds, dict[Call, int]]:
        with self.calls, cuda_kernels(), self.held:
            passed = [self._forward(number, stage) for number, stage in zip(self.numbers, self.stages, strict=True)]
            kept = Kinds(**self.held.by_label)
            self.calls.phase = "backward"
            for number, (x, out) in reversed(list(zip(self.numbers, passed, strict=True))):
                self._backward(number, x, out)
        return kept, dict(self.calls.calls)

    def _forward(self, number: int, stage: MetaStage) -> tuple[Any, Any]:
        x = self._input(number)
        out = stage.forward(
            x, self.held, recompute=self.plan.recompute, recompute_interval=self.plan.recompute_interval
        )
        if number == len(self.plan.stage_layers) - 1:
            self.held.label = "loss"
            loss_fn = TokenLoss(tensor=self.axes["tensor"], vocab_size=self.config.model.vocab_size)
            return x, loss_fn(out, (self._ids(), torch.empty((), device=META)))
        self._send(_tensors(out), number, number + 1)
        return x, out

    def _backward(self, number: int, x: Any, out: Any) -> None:
        hidden = _tensors(out)[0]
        hidden.backward(None if hidden.dim() == 0 else torch.empty_like(hidden))
        if number > 0:
            grad = _tensors(x)[0].grad
            assert grad is not None
            self._send((grad,), number, number - 1)

    def _input(self, number: int) -> Any:
        positions = self._ids() if positions_travel(self.config) else None
        if number == 0:
            return self._ids() if positions is None else (self._ids(), positions)
        batch, length = self.shape
        shards = self.axes["tensor"].size if self.plan.sequence_parallel else 1
        hidden = torch.empty(
            (batch, length // shards, self.config.model.hidden_size),
            dtype=DTYPES[self.config.precision.dtype],
            device=META,
            requires_grad=True,
        )
        return hidden if positions is None else (hidden, positions)

    def _ids(self) -> Tensor:
        return torch.empty(self.shape, dtype=torch.int64, device=META)

    def _send(self, tensors: tuple[Tensor, ...], number: int, other: int) -> None:
        """To the rank of another stage, counted as one message; nowhere where that is this rank (the V's turn)."""
        if other not in self.numbers:
            step = other - number if number < self.plan.pipeline_model_parallel_size else number - other
            message = torch.empty(sum(t.numel() * t.element_size() for t in tensors), dtype=torch.uint8, device=META)
            send(message, self.axes["pipe"], to=self.axes["pipe"].rank + step)


def _tensors(x: Any) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def _predicted_activations(config: Config, plan: ParallelPlan, pp_rank: int) -> Kinds:
    """Of one micro-batch. Rotary's tables are kept as they are where positions are not given."""
    kept = micro_batch(config, padded_vocab_size=plan.padded_vocab_size, device="cuda")
    last = config.model.num_layers + 3
    stages = []
    for low, high in (plan.stage_layers[stage] for stage in plan.stages_of(pp_rank)):
        stages.append(kept.stage(min(high, last - 2) - max(low, 1), low == 0, high == last))
    kinds = Kinds(*map(round, map(sum, zip(*stages, strict=True))))
    return kinds if positions_travel(config) else kinds._replace(context=kinds.context + round(kept.tables))


def _predicted_collectives(config: Config, plan: ParallelPlan, pp_rank: int) -> dict[Call, int]:
    """Of one micro-batch, on the axes that are run; what is computed again is part of backward."""
    calls: Counter[Call] = Counter()
    for call in communication_ledger(config, plan, pp_rank):
        if call.axis in ("tensor", "pipe") and call.phase != "step":
            phase = "forward" if call.phase == "forward" else "backward"
            key = (call.axis, phase, call.operation, call.group_size, call.bytes)
            calls[key] += call.calls // plan.num_micro_batches
    return dict(calls)
