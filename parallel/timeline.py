"""One optimizer step of a pipeline as a discrete-event simulation: which rank runs which pass when, and what idles.

The order on each rank is that of the code that really runs it (`parallel.instructions`); a pass starts when its rank is
free and its input is there. How results travel:
- 1f1b, dualpipev, gpipe wait, as DeepSpeed's calls do: a transfer starts when sender and receiver have both come to it
  and holds both until it is through (gloo returns from no send, of one number even, before the receiver has asked).
- eager1f1b does not hold the sender, but asks when it needs the input: a transfer holds the receiver alone. That its
  engine can put weight gradients after the send (fp32 without ZeRO) is not counted.
- interleaved, and any with overlap_sends=True: it starts when the pass ends and holds nobody (Megatron's
  overlap_p2p_comm).
Not here: what a pass costs, collectives, the optimizer step, contention of transfers on one link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel.instructions import WAITING, Exchange, Pass, check, instructions, passes, rank_of, source
from parallel.step_time import StageTimes, estimate_step_s

__all__ = ["Event", "StageTimes", "Timeline", "estimate_step_s", "simulate"]


@dataclass(frozen=True)
class Event:
    """A pass as it ran; kind is "forward" or "backward"."""

    rank: int
    stage: int
    kind: str
    micro_batch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """All passes of one step, rank by rank in their order."""

    schedule: str
    num_micro_batches: int
    events: tuple[Event, ...]
    step_s: float  # end of the last pass
    busy_s: tuple[float, ...]  # time in passes, by rank

    def bubble(self, rank: int) -> float:
        """Share of the step in which the rank computes nothing: it waits, or transfers."""
        return 1 - self.busy_s[rank] / self.step_s

    @property
    def mean_bubble(self) -> float:
        return 1 - sum(self.busy_s) / len(self.busy_s) / self.step_s

    @property
    def imbalance(self) -> float:
        """Busiest rank over the mean: 1 where all work the same."""
        return max(self.busy_s) * len(self.busy_s) / sum(self.busy_s)


def simulate(
    schedule: str,
    stages: Sequence[StageTimes],
    *,
    ranks: int,
    num_micro_batches: int,
    overlap_sends: bool | None = None,
) -> Timeline:
    """`stages` in the order of layers: one a rank; dualpipev 2 x ranks; interleaved chunks x ranks.

    overlap_sends: None is how the schedule is run (above). False is there for the schedules that wait; in the others
    ranks that wait for each other's sends would wait for ever.
    """
    check(schedule, stages=len(stages), ranks=ranks, num_micro_batches=num_micro_batches)
    if overlap_sends is False and schedule not in WAITING:
        raise ValueError(f"overlap_sends=False: {schedule} cannot wait for its sends; use {', '.join(WAITING)}")
    programs: list[Sequence[Pass | Exchange]] = []
    for rank in range(ranks):
        sizes = {"rank": rank, "ranks": ranks, "num_micro_batches": num_micro_batches}
        if schedule in WAITING and not overlap_sends:
            programs.append(instructions(schedule, **sizes))
        else:
            programs.append(passes(schedule, stages=len(stages), **sizes))
    run = _Run(schedule, stages, programs, holds_receiver=schedule == "eager1f1b" and overlap_sends is None)
    events = run.finish()
    return Timeline(
        schedule=schedule,
        num_micro_batches=num_micro_batches,
        events=tuple(event for line in events for event in line),
        step_s=max(line[-1].end_s for line in events),
        busy_s=tuple(sum(event.end_s - event.start_s for event in line) for line in events),
    )


class _Run:
    """The state of all ranks: each is run until it needs what is not there yet, and again when it is."""

    def __init__(
        self,
        schedule: str,
        stages: Sequence[StageTimes],
        programs: Sequence[Sequence[Pass | Exchange]],
        *,
        holds_receiver: bool,
    ):
        self.stages, self.programs, self.holds_receiver = stages, programs, holds_receiver
        ranks = len(programs)
        self.rank_of = [rank_of(schedule, stage, ranks=ranks) for stage in range(len(stages))]
        self.now = [0.0] * ranks
        self.at = [0] * ranks
        self.events: list[list[Event]] = [[] for _ in range(ranks)]
        self.ended: dict[Pass, float] = {}
        self.posted: tuple[dict[Pass, float], dict[Pass, float]] = ({}, {})  # messages: by sender, by receiver
        self.waiting: dict[object, int] = {}  # what is missing -> the rank that waits for it
        self.ready = list(range(ranks))

    def finish(self) -> list[list[Event]]:
        while self.ready:
            rank = self.ready.pop()
            program = self.programs[rank]
            while self.at[rank] < len(program):
                instruction = program[self.at[rank]]
                missing: object
                if isinstance(instruction, Pass):
                    missing = self._compute(rank, instruction)
                else:
                    missing = self._exchange(rank, instruction)
                if missing is not None:
                    self.waiting[missing] = rank
                    break
                self.at[rank] += 1
        assert not self.waiting, f"ranks wait for each other: {self.waiting}"
        return self.events

    def _wake(self, found: object) -> None:
        if found in self.waiting:
            self.ready.append(self.waiting.pop(found))

    def _compute(self, rank: int, this: Pass) -> Pass | None:
        """Run a pass; or the pass whose result it still needs."""
        start = self.now[rank]
        times = self.stages[this.stage]
        needed = source(this, stages=len(self.stages))
        if needed is not None:
            if needed not in self.ended:
                return needed
            start = self._arrival(rank, needed, start)
        end = start + (times.forward_s if this.kind == "forward" else times.backward_s)
        self.events[rank].append(Event(rank, this.stage, this.kind, this.micro_batch, start, end))
        self.now[rank] = self.ended[this] = end
        self._wake(this)
        return None

    def _arrival(self, rank: int, needed: Pass, free: float) -> float:
        """When a rank that is free can use the result of a pass; exchanged ones have arrived before."""
        ended = self.ended[needed]
        if self.rank_of[needed.stage] == rank or needed in self.posted[1]:
            return max(free, ended)
        transfer = self.stages[needed.link].send_s
        return max(free, ended) + transfer if self.holds_receiver else max(free, ended + transfer)

    def _exchange(self, rank: int, exchange: Exchange) -> tuple[int, Pass] | None:
        """Wait until the peers have come to all of it and it is through; or the first (side, message) not there."""
        free, through = self.now[rank], self.now[rank]
        sides = ((0, exchange.sends), (1, exchange.receives))
        for side, messages in sides:
            for message in messages:
                if message not in self.posted[side]:
                    self.posted[side][message] = free
                    self._wake((side, message))
        for side, messages in sides:
            for message in messages:
                other = self.posted[1 - side].get(message)
                if other is None:
                    return 1 - side, message
                through = max(through, max(free, other) + self.stages[message.link].send_s)
        self.now[rank] = through
        return None
