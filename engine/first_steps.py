"""Measures the first steps of a run beside its prediction: memory in the first, collectives in the second where asked,
step time and bubble in those after.

Entered around each clocked train_batch (`engine.meters`) on every rank alike; after the last of them it does nothing.
Not here: how each is measured (tensor_bytes, collective_times, instruction_clock) and the table
(`telemetry.prediction_table`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from engine.collective_times import CollectiveTimes
from engine.distributed import gather
from engine.session import Session
from engine.step import Trainer
from engine.tensor_bytes import MeasuredStep
from telemetry.prediction_table import STATES, RankMeasurement, StepMeasurement
from telemetry.report import StepReport

DISTURBED = 2  # first steps: allocation, first use of kernels; and here the measurements that slow a step
TIMED = 3  # steps after them
LAST = DISTURBED + TIMED


class FirstSteps:
    """watch(trainer) around each step, add(report) after it; then `done`, and results() on all ranks together."""

    def __init__(self, session: Session, *, collectives: bool, memory_before: int) -> None:
        self.session, self.collectives, self.memory_before = session, collectives, memory_before
        self.steps: list[StepReport] = []
        self.memory: MeasuredStep | None = None
        self.times: CollectiveTimes | None = None
        self.waiting: list[float] = []
        self.transfer_s: list[float] = []
        self.count = 0

    @contextmanager
    def watch(self, trainer: Trainer) -> Iterator[None]:
        self.count += 1
        if self.count == 1:
            self.memory = MeasuredStep(trainer)
            with self.memory:
                yield
        elif self.count == 2 and self.collectives:
            device = self.session.device.torch_device
            self.times = CollectiveTimes(self.session.groups, device, where=lambda: trainer.clock.current)
            with self.times:
                yield
        else:
            yield
        if DISTURBED < self.count <= LAST:
            self.waiting.append(trainer.clock.waiting_s)
            self.transfer_s.append(trainer.clock.transfer_s)

    def add(self, report: StepReport) -> bool:
        """Whether this was the last step to measure."""
        if self.count <= LAST:
            self.steps.append(report)
        return self.count == LAST and len(self.steps) == LAST

    @property
    def timed(self) -> list[StepReport]:
        """Those after the disturbed ones; all where a run has no more."""
        return self.steps[DISTURBED:] or self.steps

    def results(self) -> tuple[list[RankMeasurement], StepMeasurement]:
        """Of all ranks, by rank."""
        timed = self.timed
        return gather(self._of_this_rank()), StepMeasurement(
            first_step=timed[0].step,
            last_step=timed[-1].step,
            step_s=median(step.step_time_s for step in timed),
            tokens_per_s=median(step.tokens_per_s for step in timed),
            mfu=None if timed[0].mfu is None else median(step.mfu for step in timed if step.mfu is not None),
        )

    def _of_this_rank(self) -> RankMeasurement:
        assert self.memory is not None
        states, peak = self.memory.states, self.session.device.peak_memory_bytes()
        shares = [waited / step.step_time_s for waited, step in zip(self.waiting, self.timed, strict=False)]
        return RankMeasurement(
            pp_rank=self.session.groups.pipeline.rank,
            states={name: getattr(states, name) for name in STATES},
            activations=self.memory.activations,
            peak_bytes=peak,
            growth_bytes=peak - self.memory_before,
            bubble=median(shares) if shares else None,
            collectives=self._collectives(),
        )

    def _collectives(self) -> dict[str, Any] | None:
        if self.times is None:
            return None
        axes: dict[str, Any] = {axis: dict(found) for axis, found in self.times.axes.items()}
        if "pipe" in axes and self.transfer_s:
            axes["pipe"]["seconds"] += median(self.transfer_s)
        return axes
