"""Seconds of a step by pipeline instruction, and how long a pipeline rank waits for others, while the clock is on.

Host time on a CPU, where every instruction ends before the next begins; CUDA events on a GPU, read once after the
step. Waiting is what the schedule's simulation calls idle: sends and receives (transfers included), the reduction of a
tied table between two stages, and the end of the step, when a rank is done and others are not. That last wait falls
into the first collective of the optimizer step, so while the clock is on a reduction of one number comes before it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from parallel.groups import AxisGroup

END = "EndOfPasses"  # the wait before the optimizer step
WAITS = ("Send", "Recv", "Commit", "ReduceTied", END)  # Commit: DualPipeV's batches of sends and receives


class InstructionClock:
    """with clock: one step — then `seconds` and `waiting_s` are that step's. Off, it costs one look at a flag."""

    def __init__(self, pipeline: AxisGroup, device: torch.device) -> None:
        self.pipeline, self.device = pipeline, device
        self.seconds: dict[str, list[float]] = {}
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
            seconds[name].append(start.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - start)
        self.seconds = dict(seconds)

    @property
    def waiting_s(self) -> float:
        """Of the last step that was clocked."""
        return sum(sum(times) for name, times in self.seconds.items() if name.startswith(WAITS))

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
            self._timed(END, self._meet)
        self._timed(name, instruction)

    def _meet(self) -> None:
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.pipeline.process_group)

    def _timed(self, name: str, instruction: Callable[[], None]) -> None:
        start = self._mark()
        instruction()
        self._marks.append((name, start, self._mark()))

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
