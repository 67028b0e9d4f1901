"""Seconds of one micro-batch on each stage of a plan, and of what follows once a step: kernels and collectives joined.

A collective that may hide runs beside the weight gradients of its layer's backward (tensor axis) or beside the whole
pass (data axis, ZeRO 2 and 3); what exceeds them, and `1 - overlap` of the rest, is exposed. Not here: the order in
which stages take turns (`parallel.timeline`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from conf.schema import Config
from parallel import data_axis
from parallel.collective import Collective
from parallel.communication import (
    layers_held,
    of_block,
    of_embedding,
    of_head,
    of_step,
    sent_bytes,
)
from parallel.instructions import rank_of
from parallel.kernels import PassSeconds, Rates, block_pass, embedding_pass, head_pass, optimizer_s
from parallel.links import Fabric
from parallel.plan import ParallelPlan
from parallel.software import Software
from parallel.stage_values import trained_parameters


@dataclass(frozen=True)
class LayerTime:
    """One micro-batch through one kind of layer: computation, and exposed communication of the tensor axis."""

    compute: PassSeconds
    tensor_forward_s: float
    tensor_backward_s: float  # recomputation's included

    @property
    def forward_s(self) -> float:
        return self.compute.forward_s + self.tensor_forward_s

    @property
    def backward_s(self) -> float:
        return self.compute.backward_s + self.compute.again_s + self.tensor_backward_s


@dataclass(frozen=True)
class StageTime:
    """One micro-batch on one (virtual) stage, in seconds, by what."""

    forward_s: float  # all of the forward pass
    backward_s: float  # all of the backward pass, recomputation included
    compute_s: float
    again_s: float
    tensor_s: float
    data_s: float
    send_s: float  # to the next stage; its gradient back takes as long


@dataclass(frozen=True)
class StepTail:
    """What one pipeline rank does once a step after its last backward, in seconds."""

    reduce_s: float  # of gradients over the data axis, and of a shared word table
    optimizer_s: float
    gather_s: float  # of weights


class LayerTimes:
    """The three kinds of layers of a plan, computed once."""

    def __init__(self, config: Config, plan: ParallelPlan, rates: Rates, fabric: Fabric, software: Software):
        self.config, self.plan, self.rates, self.fabric, self.software = config, plan, rates, fabric, software
        self.block = self._layer(block_pass(config, plan, rates, software), of_block(config, plan))
        self.embedding = self._layer(embedding_pass(config, plan, rates), of_embedding(config, plan))
        self.head = self._layer(head_pass(config, plan, rates), of_head(config, plan))
        self.send_s = self._send_s()
        self.tails: dict[tuple[tuple[int, bool, bool], bool], StepTail] = {}

    def stage(self, blocks: int, *, embedding: bool, head: bool, pp_rank: int) -> StageTime:
        """One stage with so many blocks."""
        parts = [(self.block, blocks), (self.embedding, int(embedding)), (self.head, int(head))]
        forward = sum(count * part.forward_s for part, count in parts) + self.rates.micro_batch_s / 2
        backward = sum(count * part.backward_s for part, count in parts) + self.rates.micro_batch_s / 2
        data_forward, data_backward = self._data(pp_rank, forward, backward)
        return StageTime(
            forward_s=forward + data_forward,
            backward_s=backward + data_backward,
            compute_s=self.rates.micro_batch_s
            + sum(count * (part.compute.forward_s + part.compute.backward_s) for part, count in parts),
            again_s=sum(count * part.compute.again_s for part, count in parts),
            tensor_s=sum(count * (part.tensor_forward_s + part.tensor_backward_s) for part, count in parts),
            data_s=data_forward + data_backward,
            send_s=self.send_s,
        )

    def tail(self, pp_rank: int) -> StepTail:
        """What one pipeline rank does once a step; ranks that hold alike do alike."""
        kind = (layers_held(self.config, self.plan, pp_rank), pp_rank == 0)
        if kind not in self.tails:
            self.tails[kind] = self._tail(pp_rank)
        return self.tails[kind]

    def _tail(self, pp_rank: int) -> StepTail:
        config, plan = self.config, self.plan
        calls = of_step(config, plan, pp_rank, self.software)
        parameters = trained_parameters(config, plan, pp_rank)
        blocks, _, _ = layers_held(config, plan, pp_rank)
        hidden = self._seconds(call for call in calls if call.hides)
        return StepTail(
            reduce_s=self._left(hidden, blocks * self.block.backward_s)
            + self._seconds(call for call in calls if call.what != "weights" and not call.hides),
            optimizer_s=optimizer_s(parameters, config, plan, self.rates),
            gather_s=self._seconds(call for call in calls if call.what == "weights"),
        )

    def _layer(self, compute: PassSeconds, calls: Sequence[Collective]) -> LayerTime:
        exposed = {
            phase: self._seconds(call for call in calls if call.phase == phase and not call.hides)
            for phase in ("forward", "backward", "again")
        }
        hideable = self._seconds(call for call in calls if call.hides)
        exposed["backward"] += self._left(hideable, compute.weight_gradients_s)
        return LayerTime(compute, exposed["forward"], exposed["backward"] + exposed["again"])

    def _data(self, pp_rank: int, forward_s: float, backward_s: float) -> tuple[float, float]:
        """Exposed seconds of ZeRO 2 and 3 in each pass."""
        calls = data_axis.of_micro_batch(self.config, self.plan, pp_rank, self.software)
        return (
            self._left(self._seconds(call for call in calls if call.phase == "forward"), forward_s),
            self._left(self._seconds(call for call in calls if call.phase == "backward"), backward_s),
        )

    def _left(self, communication_s: float, computation_s: float) -> float:
        """What is left of communication that may hide behind so much computation."""
        return communication_s - self.rates.overlap * min(communication_s, computation_s)

    def _seconds(self, calls: Iterable[Collective]) -> float:
        return sum(call.calls * self._call_s(call) for call in calls)

    def _call_s(self, call: Collective) -> float:
        return self.fabric.seconds(
            call.operation, call.bytes, topology=self.plan.topology, axis=call.axis, group_size=call.group_size
        )

    def _send_s(self) -> float:
        plan = self.plan
        if plan.pipeline_model_parallel_size == 1:
            return 0.0
        number_of_bytes = sent_bytes(self.config, plan)
        if self.software.partitioned_sends:
            number_of_bytes //= plan.tensor_model_parallel_size
        return self.fabric.seconds("send_recv", number_of_bytes, topology=plan.topology, axis="pipe")


def stage_times(times: LayerTimes) -> list[StageTime]:
    """Of every (virtual) stage, in layer order."""
    plan, last = times.plan, times.config.model.num_layers + 2
    stages = []
    known: dict[tuple[int, bool, bool], StageTime] = {}
    for index, (first, end) in enumerate(plan.stage_layers):
        kind = (min(end, last - 1) - max(first, 1), first == 0, end == last + 1)
        if kind not in known:
            blocks, embedding, head = kind
            pp_rank = rank_of(plan.schedule, index, ranks=plan.pipeline_model_parallel_size)
            known[kind] = times.stage(blocks, embedding=embedding, head=head, pp_rank=pp_rank)
        stages.append(known[kind])
    return stages
