"""Calls, bytes and seconds of one step's collectives by axis and operation: the measured side of the communication
ledger.

Every Python call to torch.distributed, DeepSpeed's too, ends in a method of ProcessGroup: those are wrapped while it
lasts, which costs microseconds a call. With `alone`, a collective is met by all ranks of its group first, then timed by
itself to its end: what a step would have hidden behind computation is counted, waiting for a late peer is not; the step
is slowed by that, so it is one of its own. Without, a call is timed where it is waited for, peers' delays included: for
so long the rank's computation stood still. A call on a CUDA stream beside the computation's is then counted, not timed;
so is a send in either case (`engine.instruction_clock` has the receives). Other threads (a checkpoint that is saved) do
not count.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from engine.instruction_clock import END
from engine.timing import seconds_between, time_mark
from parallel.groups import Groups

# Methods of ProcessGroup: the operation, and the argument whose bytes `parallel.communication.Collective` counts.
METHODS = {
    "allreduce": ("all_reduce", 0),
    "allgather": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0),
    "all_gather_single_coalesced": ("all_gather", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "send": ("send_recv", 0),
}


@dataclass
class Total:
    """Of one operation on one axis in one step and rank. untimed: calls whose time is not in `seconds`."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0
    untimed: int = 0


class _WaitedLater:
    """The handle of a call, that times its wait."""

    def __init__(self, work: Any, around: Callable[[], AbstractContextManager[None]]) -> None:
        self._work, self._around = work, around

    def wait(self, *args: Any) -> Any:
        with self._around():
            return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class CollectiveTimes:
    """with CollectiveTimes(groups, device) as times: one step — then times.totals: (axis, operation) -> Total.

    where: names what the rank does at a call; `seconds_in` sums by it.
    """

    def __init__(
        self, groups: Groups, device: torch.device, *, alone: bool = True, where: Callable[[], str] = lambda: ""
    ) -> None:
        self.device, self.alone, self.where = device, alone, where
        self._totals: dict[tuple[str, str], Total] = {}
        self._events: list[tuple[Total, str, Any, Any, Any]] = []
        self.in_flight_s = 0.0  # of all calls that are timed, from the call on
        self.seconds_in: dict[str, float] = {}
        lines = {"tensor": groups.tensor, "data": groups.data, "pipe": groups.pipeline}
        self._axis_of = {line.ranks: axis for axis, line in reversed(lines.items()) if line.size > 1}

    @property
    def totals(self) -> dict[tuple[str, str], Total]:
        """After the step."""
        for total, place, start, end, called in self._events:
            seconds = seconds_between(start, end)
            self.in_flight_s += seconds_between(called, end)
            total.seconds += seconds
            self.seconds_in[place] = self.seconds_in.get(place, 0.0) + seconds
        self._events.clear()
        return self._totals

    @property
    def axes(self) -> dict[str, dict[str, float]]:
        """The same summed over operations: axis -> calls, bytes, seconds."""
        found: dict[str, dict[str, float]] = {}
        for (axis, _), total in self.totals.items():
            row = found.setdefault(axis, {"calls": 0, "bytes": 0, "seconds": 0.0})
            for name in row:
                row[name] += getattr(total, name)
        return found

    def __enter__(self) -> CollectiveTimes:
        self._kept = {name: method for name, method in vars(dist.ProcessGroup).items() if name in METHODS}
        for name in self._kept:
            setattr(dist.ProcessGroup, name, self._wrapped(name, getattr(dist.ProcessGroup, name)))
        return self

    def __exit__(self, *error: object) -> None:
        for name, method in self._kept.items():
            setattr(dist.ProcessGroup, name, method)

    def _wrapped(self, method: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        operation, argument = METHODS[method]

        def call(group: dist.ProcessGroup, *args: Any, **named: Any) -> Any:
            ranks = tuple(dist.get_process_group_ranks(group))
            if len(ranks) == 1 or not _trains() or self.where() == END:  # at END it is the clock's own
                return plain(group, *args, **named)
            axis = "pipe" if operation == "send_recv" else self._axis_of.get(ranks, "other")
            total, size = self._totals.setdefault((axis, operation), Total()), _bytes(args[argument])
            total.calls += 1
            total.bytes += size
            if operation == "send_recv":  # to wait for it here could wait for a rank that waits for this one
                return plain(group, *args, **named)
            if self.alone:
                dist.barrier(group=group)
                self._synchronize()
            elif _is_beside(self.device):
                total.untimed += 1
                return plain(group, *args, **named)
            elif _options(args, named).asyncOp:
                called = time_mark(self.device)
                return _WaitedLater(plain(group, *args, **named), lambda: self._timed(total, called=called))
            with self._timed(total):
                work = plain(group, *args, **named)
                if work is not None:
                    work.wait()
                if self.alone:
                    self._synchronize()
            return work

        return call

    @contextmanager
    def _timed(self, total: Total, *, called: Any = None) -> Iterator[None]:
        start = time_mark(self.device)
        yield
        end = time_mark(self.device)
        self._events.append((total, self.where(), start, end, start if called is None else called))

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _trains() -> bool:
    """Whether this is the training thread, or one of autograd's, which Python did not start."""
    thread = threading.current_thread()
    return thread is threading.main_thread() or isinstance(thread, threading._DummyThread)


def _is_beside(device: torch.device) -> bool:
    """Whether what is called now runs beside the computation's stream."""
    return device.type == "cuda" and torch.cuda.current_stream(device) != torch.cuda.default_stream(device)


def _options(args: Any, named: Any) -> Any:
    return named["opts"] if "opts" in named else args[-1]


def _bytes(tensors: Any) -> int:
    """Of a tensor, or of all in nested lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_bytes, tensors))
