"""Seconds of a step by the engine's instructions, and how long a pipeline rank waits for others, while the clock is on.

Host time on a CPU, where every instruction ends before the next begins; CUDA events on a GPU, read once after the
step. Waiting is what the schedule's simulation calls idle: sends and receives (transfers included), the reduction of a
tied table between two stages, and the end of the step, when a rank is done and others are not. That last wait falls
into the first collective of the optimizer step, so while the clock is on a reduction of one number comes before it.
Recomputation is a part of the backward pass that is timed a second time, by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from engine.timing import seconds_between, time_mark
from parallel.groups import AxisGroup

END = "EndOfPasses"  # the wait before the optimizer step
WAITS = ("Send", "Recv", "Commit", "ReduceTied", END)  # Commit: DualPipeV's batches of sends and receives
COMPUTES = ("Forward", "Backward", "Weight")  # passes, whole or in parts, and weight gradients that were put off
RECOMPUTES = "Recompute"  # inside a backward pass


class InstructionClock:
    """with clock: one step — then `seconds` and `waiting_s` are that step's. Off, it costs one look at a flag."""

    def __init__(self, pipeline: AxisGroup, device: torch.device) -> None:
        self.pipeline, self.device = pipeline, device
        self.seconds: dict[str, list[float]] = {}
        self.current = ""  # the instruction that runs now
        self.annotate: Callable[[str], AbstractContextManager[Any]] = nullcontext  # entered around each; by a profiler
        self._on = False
        self._marks: list[tuple[str, Any, Any]] = []

    def __enter__(self) -> InstructionClock:
        self._on, self._marks = True, []
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._on = False
        if error is not None:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = defaultdict(list)
        for name, start, end in self._marks:
            seconds[name].append(seconds_between(start, end))
        self.seconds = dict(seconds)

    @property
    def totals(self) -> dict[str, float]:
        """Seconds of each instruction in the last step, recomputation apart."""
        return {name: sum(times) for name, times in self.seconds.items() if name != RECOMPUTES}

    @property
    def waiting_s(self) -> float:
        """Of the last step that was clocked."""
        return sum(seconds for name, seconds in self.totals.items() if name.startswith(WAITS))

    @property
    def passes_s(self) -> float:
        """Forward and backward passes, recomputation and collectives inside them included."""
        return sum(seconds for name, seconds in self.totals.items() if name.startswith(COMPUTES))

    @property
    def recompute_s(self) -> float:
        return sum(self.seconds.get(RECOMPUTES, ()))

    @property
    def transfer_s(self) -> float:
        """Of all receives, each taken to last as long as the fastest of its kind: slower ones waited for the sender."""
        return sum(
            len(times) * min(times) for name, times in self.seconds.items() if name.startswith(("Recv", "Commit"))
        )

    def run(self, name: str, instruction: Callable[[], None]) -> None:
        if not self._on:
            instruction()
            return
        if name == "OptimizerStep" and self.pipeline.size > 1:
            with self.span(END):
                self._meet()
        with self.span(name):
            instruction()

    def _meet(self) -> None:
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.pipeline.process_group)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A part of a step under that name."""
        if not self._on:
            yield
            return
        outer, self.current = self.current, name
        start = time_mark(self.device)
        try:
            with self.annotate(name):
                yield
        finally:  # torch ends a recomputation by an exception as soon as it has what it needs
            self._marks.append((name, start, time_mark(self.device)))
            self.current = outer
