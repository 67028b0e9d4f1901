"""What is measured of every step, and now and then of every rank: entered around each train_batch.

Every step is clocked by the engine's instructions (two readings each). Every `telemetry.ranks_interval` steps the
collectives are timed where they stand too, and all ranks tell each other what they saw, over the host's network. Not
here: the first steps beside the prediction (`engine.first_steps`), and the names that sinks see (`telemetry.report`,
`telemetry.ranks`). Where asked, windows of steps are profiled (`engine.profile_window`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from engine.collective_times import CollectiveTimes
from engine.distributed import gather
from engine.first_steps import LAST, FirstSteps
from engine.instruction_clock import COMPUTES, RECOMPUTES, WAITS, InstructionClock
from engine.profile_window import ProfileWindow
from engine.session import Session
from engine.step import Trainer
from telemetry.ranks import CollectiveReport, RankReport, RanksReport
from telemetry.report import StepReport


class Meters:
    """watch(trainer) around each step, see(report) after it; on all ranks alike. ledger: predicted bytes a stage."""

    def __init__(
        self, session: Session, first: FirstSteps, *, interval: int, memory_before: int, ledger: Sequence[int],
        profile: ProfileWindow | None = None,
    ) -> None:  # fmt: skip
        self.session, self.first, self.interval, self.profile = session, first, interval, profile
        self.memory_before, self.ledger = memory_before, ledger
        self.step = 0
        self.written_s = 0.0  # that sinks took for the step before
        self.clock: InstructionClock | None = None
        self.times: CollectiveTimes | None = None

    @contextmanager
    def watch(self, trainer: Trainer, step: int) -> Iterator[None]:
        self.clock, self.times, self.step = trainer.clock, None, step
        with ExitStack() as stack:
            if self.profile is not None:
                stack.enter_context(self.profile.watch(trainer, step))
            stack.enter_context(self.first.watch(trainer))
            if self._samples():
                session = self.session
                self.times = CollectiveTimes(
                    session.groups, session.device.torch_device, alone=False, where=lambda: trainer.clock.current
                )
                stack.enter_context(self.times)
            stack.enter_context(trainer.clock)
            yield

    def _samples(self) -> bool:
        """The first steps are left to their own measurements."""
        after = self.first.count - LAST
        return self.interval > 0 and after > 0 and (after == 1 or self.step % self.interval == 0)

    def see(self, report: StepReport) -> StepReport:
        """The report with what was measured in its step."""
        assert self.clock is not None
        start = time.perf_counter()
        ranks = self.hear(report.step_time_s)
        spent = time.perf_counter() - start + self.written_s
        # A window's trace is no part of what every step costs.
        profiled = self.profile.end(report.step) if self.profile is not None else None
        return replace(report, instructions=self.clock.totals, ranks=ranks, profiled=profiled, telemetry_time_s=spent)

    def hear(self, step_s: float) -> RanksReport | None:
        """What all ranks saw in the step, where it is one in which they tell."""
        if self.clock is None or self.times is None:
            return None
        own = _of_this_rank(self.session, self.clock, self.times, step_s, self.memory_before)
        return RanksReport(gather(own, group=self.session.control), self.ledger)


def _of_this_rank(
    session: Session, clock: InstructionClock, times: CollectiveTimes, step_s: float, memory_before: int
) -> RankReport:
    pp, dp, tp = session.plan.coordinate(session.rank)
    totals = times.totals
    still = {place: seconds for place, seconds in times.seconds_in.items() if not place.startswith(WAITS)}
    in_passes = sum(seconds for place, seconds in still.items() if place.startswith((*COMPUTES, RECOMPUTES)))
    again = clock.recompute_s - sum(seconds for place, seconds in still.items() if place == RECOMPUTES)
    peak = session.device.peak_memory_bytes()
    return RankReport(
        rank=session.rank, host=session.hosts[session.rank], pp=pp, dp=dp, tp=tp, step_s=step_s,
        compute_s=clock.passes_s - in_passes, recompute_s=again, waiting_s=clock.waiting_s,
        communication_s=sum(still.values()) + clock.transfer_s,
        in_flight_s=times.in_flight_s,
        memory_bytes=session.device.memory_bytes(), peak_bytes=peak, growth_bytes=peak - memory_before,
        collectives=[
            CollectiveReport(
                axis, operation, total.calls, total.bytes,
                clock.transfer_s if operation == "send_recv" else None if total.untimed else total.seconds,
            )
            for (axis, operation), total in totals.items()
        ],
    )  # fmt: skip
