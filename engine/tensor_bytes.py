"""Bytes that this rank's real tensors hold: states by category, and what autograd keeps for backward at its most.

The measured side of the memory ledger (`parallel.memory`), in the ledger's own categories. Distinct storages are
counted, so views and flat buffers count once. Nothing here looks at the process: allocator slack, caches and libraries
are not tensors. Meant for one step, the first: hooks on every saved tensor and a walk over the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from engine.step import Trainer

MOMENTS = ("exp_avg", "exp_avg_sq")  # torch.optim.AdamW's names


@dataclass(frozen=True)
class StateTotals:
    """Bytes of one rank, as `parallel.memory.Ledger` names them; `host`: of these, in host memory beside a GPU."""

    weights: int
    gradients: int
    master_weights: int
    optimizer_moments: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.master_weights + self.optimizer_moments


def measure_states(trainer: Trainer) -> StateTotals:
    """What is held now. Gradients live from the first backward pass to the step: see `MeasuredStep` for them."""
    weights = dict(_storages(_weights(trainer)))
    gradients = dict(_storages(_gradients(trainer)))
    optimizer = _base_optimizer(trainer)
    masters = dict(_storages(p for group in optimizer.param_groups for p in group["params"]))
    moments = dict(_storages(state[name] for state in optimizer.state.values() for name in MOMENTS if name in state))
    return StateTotals(
        weights=sum(weights.values()),
        gradients=sum(gradients.values()),
        master_weights=sum(size for place, size in masters.items() if place not in weights),
        optimizer_moments=sum(moments.values()),
    )


def _storages(tensors: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
    """(address, bytes) of each tensor's storage, empty ones left out."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            yield storage.data_ptr(), storage.nbytes()


def _base_optimizer(trainer: Trainer) -> torch.optim.Optimizer:
    """torch's optimizer inside DeepSpeed's, or by itself."""
    return trainer.engine.basic_optimizer


def _weights(trainer: Trainer) -> Iterator[Tensor]:
    for parameter in trainer.module.parameters():
        yield getattr(parameter, "ds_tensor", parameter)  # ZeRO 3: this rank's part


def _gradients(trainer: Trainer) -> Iterator[Tensor]:
    """Each parameter's own, and the places where DeepSpeed's optimizers accumulate or keep their partition of them."""
    for parameter in trainer.module.parameters():
        for held in (parameter.grad, getattr(parameter, "grad_accum", None)):
            if held is not None:
                yield held
    optimizer = trainer.engine.optimizer
    yield from getattr(optimizer, "fp32_groups_gradients_flat", ())  # BF16_Optimizer
    partitions = getattr(optimizer, "averaged_gradients", {})  # ZeRO 1 and 2, by parameter group
    yield from (part for parts in partitions.values() if parts is not None for part in parts if part is not None)
    flat = getattr(optimizer, "grad_partitions_flat_buffer", None)  # ZeRO 3
    if flat is not None:
        yield flat


class HeldActivations:
    """with HeldActivations(parameters) as held: ... — then held.peak_bytes is what was saved for backward at its most.

    Parameters' own storages are left out. What a checkpointed region builds again in backward is not seen.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.bytes = self.peak_bytes = 0
        self._users: dict[int, int] = {}  # by address of a storage
        self._weights = {p.untyped_storage().data_ptr() for p in self.parameters}
        self._hooks: Any = None

    def __enter__(self) -> HeldActivations:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> _Saved:
        return _Saved(tensor, self)

    def _is_weight(self, place: int) -> bool:
        if place in self._weights:
            return True
        if not any(hasattr(p, "ds_tensor") for p in self.parameters[:1]):
            return False
        return any(p.untyped_storage().data_ptr() == place for p in self.parameters)  # ZeRO 3 gathers them anew

    def add(self, tensor: Tensor) -> int:
        """Count one more user of the tensor's storage; its address, or 0 where it is not an activation."""
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place == 0 or (place not in self._users and self._is_weight(place)):
            return 0
        if place not in self._users:
            self.bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        self._users[place] = self._users.get(place, 0) + 1
        return place

    def remove(self, place: int, size: int) -> None:
        self._users[place] -= 1
        if not self._users[place]:
            del self._users[place]
            self.bytes -= size


class _Saved:
    """A tensor that autograd keeps; counted until autograd lets go of it."""

    __slots__ = ("held", "place", "size", "tensor")

    def __init__(self, tensor: Tensor, held: HeldActivations) -> None:
        self.tensor, self.held = tensor, held
        self.size = tensor.untyped_storage().nbytes()
        self.place = held.add(tensor)

    def __del__(self) -> None:
        if self.place:
            self.held.remove(self.place, self.size)


class MeasuredStep:
    """with MeasuredStep(trainer) as measured: one train_batch — then measured.states and measured.activations.

    Gradients are taken just before the optimizer steps, the other states after it (moments exist only then).
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.held = HeldActivations(trainer.module.parameters())
        self.gradients = 0
        self.states = StateTotals(0, 0, 0, 0)

    @property
    def activations(self) -> int:
        return self.held.peak_bytes

    def __enter__(self) -> MeasuredStep:
        engine = self.trainer.engine
        take_step = engine._take_model_step

        def measured_step(*args: Any, **named: Any) -> None:
            self.gradients = measure_states(self.trainer).gradients
            engine._take_model_step = take_step
            take_step(*args, **named)

        engine._take_model_step = measured_step
        self.held.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.held.__exit__(kind, error, trace)
        if error is None:
            after = measure_states(self.trainer)
            self.states = StateTotals(after.weights, self.gradients, after.master_weights, after.optimizer_moments)
