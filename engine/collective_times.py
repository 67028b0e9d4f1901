"""Calls, bytes and seconds of one step's collectives by axis: the measured side of the communication ledger.

Every call to torch.distributed is seen as the operation that it dispatches, whoever makes it. A collective is met by
all ranks of its group first, then timed alone to its end: what a step would have hidden behind computation is counted,
waiting for a late peer is not. The step is slowed by that, so it is one of its own. Sends are counted, not timed
(`engine.instruction_clock` has the receives).
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.groups import Groups

# What the operation's bytes are, as `parallel.communication.Collective` counts them: of its first or second argument.
OPERATIONS = {
    "allreduce_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "send": ("send_recv", 0),
}


class CollectiveTimes(TorchDispatchMode):
    """with CollectiveTimes(groups, device) as times: one step — then times.axes: axis -> calls, bytes, seconds."""

    def __init__(self, groups: Groups, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.axes: dict[str, dict[str, float]] = {}
        lines = {"tensor": groups.tensor, "data": groups.data, "pipe": groups.pipeline}
        self._axis_of = {line.ranks: axis for axis, line in reversed(lines.items()) if line.size > 1}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "c10d":
            return func(*args, **kwargs)
        operation = OPERATIONS.get(func._opname)
        if operation is None:
            return func(*args, **kwargs)
        name, argument = operation
        group = next(dist.ProcessGroup.unbox(value) for value in args if isinstance(value, torch.ScriptObject))
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) == 1:
            return func(*args, **kwargs)
        axis = "pipe" if name == "send_recv" else self._axis_of.get(ranks, "other")
        if name == "send_recv":  # to wait for it here could wait for a rank that waits for this one
            self._count(axis, _bytes(args[argument]), 0.0)
            return func(*args, **kwargs)
        dist.barrier(group=group)
        start = self._now()
        result = func(*args, **kwargs)
        _work(result).wait()
        self._count(axis, _bytes(args[argument]), self._now() - start)
        return result

    def _count(self, axis: str, number_of_bytes: int, seconds: float) -> None:
        found = self.axes.setdefault(axis, {"calls": 0, "bytes": 0, "seconds": 0.0})
        found["calls"] += 1
        found["bytes"] += number_of_bytes
        found["seconds"] += seconds

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _bytes(tensors: Any) -> int:
    """Of a tensor, or of all in nested lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_bytes, tensors))


def _work(result: Any) -> Any:
    """The handle among what a collective's operation returns: it, or the last of a tuple."""
    boxed = result if isinstance(result, torch.ScriptObject) else result[-1]
    return dist.Work.unbox(boxed) if isinstance(boxed, torch.ScriptObject) else boxed
