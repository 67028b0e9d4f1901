"""Bytes that this rank's real tensors hold: states by category, and what autograd keeps for backward at its most.

The measured side of the memory ledger (`parallel.memory`), in the ledger's own categories. Distinct storages are
counted, so views and flat buffers count once. Nothing here looks at the process: allocator slack, caches and libraries
are not tensors. Meant for one step, the first: hooks on every saved tensor and a walk over the parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from deepspeed.runtime.pipe.schedule import ReduceGrads
from torch import Tensor

from engine.step import Trainer

SMALLEST = 24  # bytes of a storage that counts: a scale or the two seeds of a kernel are no activations
MOMENTS = ("exp_avg", "exp_avg_sq")  # torch.optim.AdamW's names


@dataclass(frozen=True)
class StateTotals:
    """Bytes of one rank, as `parallel.ledger.Ledger` names them."""

    weights: int
    gradients: int
    low_precision_gradients: int
    master_weights: int
    optimizer_moments: int

    @property
    def total(self) -> int:
        """As Ledger.states: without the low-precision gradients, which live within a step."""
        return self.weights + self.gradients + self.master_weights + self.optimizer_moments


def measure_states(trainer: Trainer) -> StateTotals:
    """What is held now. Gradients live from the first backward pass to the step: see `MeasuredStep` for them."""
    optimizer = trainer.engine.optimizer
    own = dict(_storages(p.grad for p in trainer.module.parameters() if p.grad is not None))
    sums = dict(_storages(_gradient_sums(trainer)))
    weights = dict(_storages(getattr(p, "ds_tensor", p) for p in trainer.module.parameters()))  # ZeRO 3: its part
    base: torch.optim.Optimizer = trainer.engine.basic_optimizer
    masters = [p for group in base.param_groups for p in group["params"]]
    masters += getattr(optimizer, "fp32_partitioned_groups_flat", [])  # ZeRO 3 takes them out of the groups
    moments = [state[name] for state in base.state.values() for name in MOMENTS if name in state]
    return StateTotals(
        weights=sum(weights.values()),
        gradients=sum((sums or own).values()),
        low_precision_gradients=sum(own.values()) if sums else 0,
        master_weights=sum(size for place, size in dict(_storages(masters)).items() if place not in weights),
        optimizer_moments=sum(dict(_storages(moments)).values()),
    )


def _storages(tensors: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
    """(address, bytes) of each tensor's storage, empty ones left out."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            yield storage.data_ptr(), storage.nbytes()


def _gradient_sums(trainer: Trainer) -> Iterator[Tensor]:
    """Where DeepSpeed's optimizers add gradients up or keep their partition of them, beside each parameter's own."""
    optimizer = trainer.engine.optimizer
    yield from getattr(optimizer, "fp32_groups_gradients_flat", ())  # BF16_Optimizer
    accumulated = (getattr(p, "grad_accum", None) for p in trainer.module.parameters())  # ZeRO 1 of two types
    yield from (held for held in accumulated if held is not None)
    flat = getattr(optimizer, "grad_partitions_flat_buffer", None)  # ZeRO 3
    if flat is not None:
        yield flat
        return
    partitions = getattr(optimizer, "averaged_gradients", {}).values()  # ZeRO 1 and 2, by parameter group
    yield from (part for parts in partitions if parts is not None for part in parts if part is not None)


class HeldActivations:
    """with HeldActivations(parameters) as held: ... — then held.peak_bytes is what was saved for backward at its most.

    Parameters' own storages are left out, and single numbers. What a checkpointed region builds again in backward is
    not seen, nor what its closure holds (`hold` counts such tensors). `label`: under what the next tensors are counted.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.bytes = self.peak_bytes = 0
        self.label = ""
        self.by_label: Counter[str] = Counter()
        self._users: Counter[int] = Counter()  # by storage
        self._gathers = any(hasattr(p, "ds_tensor") for p in self.parameters)  # ZeRO 3 builds whole weights anew
        self._weights = set() if self._gathers else {_place(p) for p in self.parameters}
        self._hooks: Any = None

    def __enter__(self) -> HeldActivations:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.hold, lambda saved: saved.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def hold(self, tensor: Tensor) -> Saved:
        """Count the tensor for as long as the result lives."""
        place, size = _place(tensor), tensor.untyped_storage().nbytes()
        if size < SMALLEST or (place not in self._users and self._is_weight(place)):
            return Saved(tensor)
        if place not in self._users:
            self.bytes += size
            self.peak_bytes = max(self.peak_bytes, self.bytes)
            self.by_label[self.label] += size
        self._users[place] += 1
        return Saved(tensor, partial(self._let_go, place, size))

    def _is_weight(self, place: int) -> bool:
        return place in self._weights or (self._gathers and any(_place(p) == place for p in self.parameters))

    def _let_go(self, place: int, size: int) -> None:
        self._users[place] -= 1
        if not self._users[place]:
            del self._users[place]
            self.bytes -= size


def _place(tensor: Tensor) -> int:
    """The same for views of one storage; tensors on the meta device have no address."""
    return tensor.untyped_storage()._cdata


class Saved:
    """A tensor that is kept; calls `let_go` when it is no longer."""

    __slots__ = ("_let_go", "tensor")

    def __init__(self, tensor: Tensor, let_go: Callable[[], None] = lambda: None) -> None:
        self.tensor, self._let_go = tensor, let_go

    def __del__(self) -> None:
        self._let_go()


class MeasuredStep:
    """with MeasuredStep(trainer) as measured: one train_batch — then measured.states and measured.activations.

    Gradients are taken at their most: before the pipeline reduces them, or before the optimizer steps. The other states
    are taken after the step, as moments exist only then.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.held = HeldActivations(trainer.module.parameters())
        self.gradients = self.low_precision_gradients = 0
        self.states = StateTotals(0, 0, 0, 0, 0)
        self._undo = ExitStack()

    @property
    def activations(self) -> int:
        """Most bytes saved for backward at once, over all micro-batches in flight."""
        return self.held.peak_bytes

    def __enter__(self) -> MeasuredStep:
        engine = self.trainer.engine
        self._before(vars(engine), "_take_model_step", engine._take_model_step)
        instructions = getattr(engine, "_INSTRUCTION_MAP", {})
        if ReduceGrads in instructions:
            self._before(instructions, ReduceGrads, instructions[ReduceGrads])
        self._undo.enter_context(self.held)
        return self

    def _before(self, place: dict, key: Any, run: Callable[..., Any]) -> None:
        """Have place[key] note the gradients and then run, until the measurement ends."""

        def noted(*args: Any, **named: Any) -> Any:
            now = measure_states(self.trainer)
            if now.gradients + now.low_precision_gradients > self.gradients + self.low_precision_gradients:
                self.gradients, self.low_precision_gradients = now.gradients, now.low_precision_gradients
            return run(*args, **named)

        was = place.get(key)
        place[key] = noted
        self._undo.callback(place.pop if was is None else place.__setitem__, key, *([] if was is None else [was]))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()
        if error is None:
            self.states = replace(
                measure_states(self.trainer),
                gradients=self.gradients,
                low_precision_gradients=self.low_precision_gradients,
            )
