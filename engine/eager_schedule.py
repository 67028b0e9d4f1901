"""Eager 1F1B on DeepSpeed's pipeline engine: more forwards in flight, and sends that do not wait for the receiver.

A stage computes up to 2 (P - stage) - 1 forwards before its first backward, where 1F1B computes P - stage
(arXiv:2211.05322): gradients then arrive while it still has forwards to do. It costs the activations of up to P - 1
more micro-batches on the first stage. Later stages send the gradient of their input first and compute those of their
weights then, where the engine takes weight gradients itself (arXiv:2401.10241). Activations and gradients travel on a
process group each, so that neither direction waits for the other. Not here: what a stage computes (engine/pipeline.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from model.tensor_parallel.weight_gradients import WeightGradients
from parallel.groups import AxisGroup
from parallel.states import in_flight


class WeightGradientPass(schedule.PipeInstruction):
    """Compute the weight gradients that the last backward pass put off."""


class EagerSchedule(schedule.PipeSchedule):
    """The commands of one optimizer step on one stage."""

    def num_pipe_buffers(self) -> int:
        return max(2, self._warm_up())

    def _warm_up(self) -> int:
        return in_flight(self.stage_id, pp=self.stages, num_micro_batches=self.micro_batches, schedule="eager1f1b")

    def steps(self) -> Iterator[list[schedule.PipeInstruction]]:
        ahead = self._warm_up()
        for micro_batch in range(ahead):
            yield self._forward(micro_batch)
        for micro_batch in range(self.micro_batches):
            yield self._backward(micro_batch)
            if micro_batch + ahead < self.micro_batches:
                yield self._forward(micro_batch + ahead)
        yield [schedule.ReduceTiedGrads(), schedule.ReduceGrads(), schedule.OptimizerStep()]

    def _forward(self, micro_batch: int) -> list[schedule.PipeInstruction]:
        buffer = self._buffer_idx(micro_batch)
        commands = [] if self.is_first_stage else [schedule.RecvActivation(buffer)]
        if self.is_first_stage or self.is_last_stage:
            commands.append(schedule.LoadMicroBatch(buffer))
        commands.append(schedule.ForwardPass(buffer))
        return commands if self.is_last_stage else [*commands, schedule.SendActivation(buffer)]

    def _backward(self, micro_batch: int) -> list[schedule.PipeInstruction]:
        buffer = self._buffer_idx(micro_batch)
        commands = [] if self.is_last_stage else [schedule.RecvGrad(buffer)]
        commands.append(schedule.BackwardPass(buffer))
        return commands if self.is_first_stage else [*commands, schedule.SendGrad(buffer), WeightGradientPass()]


class EagerExchange:
    """Sends and receives of one rank's engine, in place of DeepSpeed's blocking ones."""

    def __init__(self, engine: PipelineEngine, pipeline: AxisGroup, *, lines: Sequence[Sequence[int]]):
        """`lines`: the global ranks of every pipeline of the mesh; a collective call, on all ranks alike."""
        self.pipeline = pipeline
        self.activations, self.gradients = (_line_group(lines) for _ in range(2))
        self.shapes: Any = None  # of what the previous stage sends, learnt once
        self.weight_gradients: WeightGradients | None = None  # none: autograd computes them in the backward pass
        self.in_transit: list[tuple[dist.Work, torch.Tensor]] = []
        engine._train_schedule = lambda: EagerSchedule(engine.micro_batches, engine.num_stages, engine.stage_id)
        engine._INSTRUCTION_MAP = {
            **engine._INSTRUCTION_MAP,
            schedule.SendActivation: lambda engine, buffer_id: self.send_activations(engine, buffer_id),
            schedule.RecvActivation: lambda engine, buffer_id: self.receive_activations(engine, buffer_id),
            schedule.SendGrad: lambda engine, buffer_id: self.send_gradients(engine, buffer_id),
            WeightGradientPass: lambda engine: self.weight_gradients and self.weight_gradients.flush(),
            schedule.RecvGrad: lambda engine, buffer_id: self.receive_gradients(engine, buffer_id),
        }

    def send_activations(self, engine: PipelineEngine, buffer_id: int) -> None:
        outputs = engine.pipe_buffers["outputs"][buffer_id]
        if engine.first_output_send:
            engine.first_output_send = False
            engine._send_tensor_meta(outputs, engine.next_stage)
        for tensor in _as_list(outputs):
            self._send(tensor.detach(), engine.next_stage, self.activations)

    def receive_activations(self, engine: PipelineEngine, buffer_id: int) -> None:
        if self.shapes is None:
            self.shapes = engine._recv_tensor_meta(engine.prev_stage)
        received = [self._receive(like, engine.prev_stage, self.activations) for like in _as_list(self.shapes)]
        for tensor in received:
            tensor.requires_grad_(tensor.is_floating_point())
        engine.pipe_buffers["inputs"][buffer_id] = received[0] if torch.is_tensor(self.shapes) else tuple(received)

    def send_gradients(self, engine: PipelineEngine, buffer_id: int) -> None:
        for tensor in _as_list(engine.pipe_buffers["inputs"][buffer_id]):
            if tensor.is_floating_point():
                assert tensor.grad is not None
                self._send(tensor.grad, engine.prev_stage, self.gradients)
        engine.pipe_buffers["inputs"][buffer_id] = None

    def receive_gradients(self, engine: PipelineEngine, buffer_id: int) -> None:
        outputs = engine.pipe_buffers["outputs"][buffer_id]
        received = [
            self._receive(like, engine.next_stage, self.gradients)
            for like in _as_list(outputs)
            if like.is_floating_point()
        ]
        engine.grad_layer = received[0] if torch.is_tensor(outputs) else received

    def finish(self) -> None:
        """Wait until everything sent has been taken."""
        for work, _ in self.in_transit:
            work.wait()
        self.in_transit.clear()

    def _send(self, tensor: torch.Tensor, stage: int, group: Any) -> None:
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self.pipeline.ranks[stage], group=group)
        assert work is not None
        self.in_transit.append((work, tensor))  # the tensor must live until it has left

    def _receive(self, like: torch.Tensor, stage: int, group: Any) -> torch.Tensor:
        tensor = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        dist.recv(tensor, self.pipeline.ranks[stage], group=group)
        return tensor


def _line_group(lines: Sequence[Sequence[int]]) -> Any:
    """A new group for this rank's line (torch wants every rank in every new_group call)."""
    groups = [(line, dist.new_group(list(line))) for line in lines]
    return next(group for line, group in groups if dist.get_rank() in line)


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if torch.is_tensor(tensors) else list(tensors)
