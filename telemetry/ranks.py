"""What all ranks saw in one step, as every sink takes it: pipeline, memory, communication, stragglers.

Values in, flat metrics out. Of a pipeline stage counts the mean over its ranks for times and the largest rank for
memory; of each collective the stage that makes, sends or spends most. A bubble is the share of a step that a stage
waits for other stages, transfers included (as in `telemetry.prediction_table`). Not here: how each is measured
(`engine.meters`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import mean
from typing import Any

Metrics = dict[str, Any]


@dataclass(frozen=True)
class CollectiveReport:
    """One operation on one axis in one step and rank. seconds: for which computation stood still; None: not known, it
    runs on a stream of its own (the profiler's windows tell)."""

    axis: str  # tensor, pipe, data, or other
    operation: str
    calls: int
    bytes: int
    seconds: float | None


@dataclass(frozen=True)
class RankReport:
    """One rank in one step. Seconds are of that step, bytes of the device (CPU: of the process)."""

    rank: int
    host: str
    pp: int
    dp: int
    tp: int
    step_s: float
    compute_s: float  # forward and backward passes without the collectives inside them, recomputation included
    recompute_s: float
    waiting_s: float  # for other stages, transfers included
    communication_s: float  # collectives and transfers for which computation stood still
    memory_bytes: int  # in use after the step
    peak_bytes: int  # largest so far
    growth_bytes: int  # of the peak since before the model was built
    collectives: Sequence[CollectiveReport] = ()
    in_flight_s: float | None = None  # collectives from their call until what waits for them goes on; None: not known

    def as_row(self) -> dict[str, Any]:
        """For ranks.jsonl."""
        calls = {
            f"{one.axis}/{one.operation}": {"calls": one.calls, "bytes": one.bytes, "seconds": one.seconds}
            for one in self.collectives
        }
        return asdict(self) | {"collectives": calls}

    @property
    def overlap(self) -> float | None:
        """Share of the time that its collectives were in flight in which computation went on."""
        seconds = [one.seconds for one in self.collectives if one.operation != "send_recv"]
        if not self.in_flight_s or None in seconds:
            return None
        return 1 - sum(one for one in seconds if one is not None) / self.in_flight_s


@dataclass(frozen=True)
class Slowest:
    """slowdown: its compute time over the median of the other ranks of its stage."""

    rank: int
    host: str
    slowdown: float


@dataclass(frozen=True)
class RanksReport:
    """All ranks of one step, by rank. ledger: predicted bytes of each pipeline rank, in all."""

    ranks: Sequence[RankReport]
    ledger: Sequence[int] = ()

    @cached_property
    def stages(self) -> list[list[RankReport]]:
        return [[one for one in self.ranks if one.pp == pp] for pp in range(1 + max(one.pp for one in self.ranks))]

    @cached_property
    def slowest(self) -> Slowest:
        """The rank that computes longest beside those that compute the same: the other ranks of its stage."""
        found = []
        for stage in self.stages:
            ordered = sorted(one.compute_s for one in stage)
            for one in stage:
                others = median_of_others(ordered, one.compute_s) or one.compute_s or 1.0
                found.append(Slowest(one.rank, one.host, one.compute_s / others))
        return max(found, key=lambda one: one.slowdown)

    def as_metrics(self) -> Metrics:
        """Flat names, one value a run or a stage; those of single ranks are in ranks.jsonl."""
        return dict(self._metrics)

    @cached_property
    def _metrics(self) -> Metrics:
        """Once for all sinks: there may be thousands of ranks."""
        return self._pipeline() | self._memory() | self._communication() | self._ranks()

    def _pipeline(self) -> Metrics:
        bubbles = [mean(one.waiting_s / one.step_s for one in stage) for stage in self.stages]
        compute = [mean(one.compute_s for one in stage) for stage in self.stages]
        found: Metrics = {"pipeline/bubble": mean(bubbles), "pipeline/imbalance": max(compute) / (mean(compute) or 1.0)}
        again = sum(one.recompute_s for one in self.ranks)
        found["pipeline/recompute_share"] = again / (sum(one.compute_s for one in self.ranks) or 1.0)
        found |= {f"pipeline/bubble/stage{pp}": bubble for pp, bubble in enumerate(bubbles)}
        return found | {f"pipeline/compute_s/stage{pp}": seconds for pp, seconds in enumerate(compute)}

    def _memory(self) -> Metrics:
        found: Metrics = {"memory/peak_bytes": max(one.peak_bytes for one in self.ranks)}
        for pp, stage in enumerate(self.stages):
            growth = max(one.growth_bytes for one in stage)
            found[f"memory/peak_bytes/stage{pp}"] = max(one.peak_bytes for one in stage)
            found[f"memory/bytes/stage{pp}"] = max(one.memory_bytes for one in stage)
            found[f"memory/growth_bytes/stage{pp}"] = growth
            if self.ledger:
                found[f"memory/of_ledger/stage{pp}"] = growth / self.ledger[pp]
        return found

    def _communication(self) -> Metrics:
        found: Metrics = {
            "communication/exposed_share": max(mean(one.communication_s / one.step_s for one in s) for s in self.stages)
        }
        overlaps = [one.overlap for one in self.ranks if one.overlap is not None]
        if overlaps:
            found["communication/overlap_share"] = mean(overlaps)
        kinds = sorted({(call.axis, call.operation) for one in self.ranks for call in one.collectives})
        for axis, operation in kinds:
            rows = [_of_stage(stage, axis, operation) for stage in self.stages]
            for name in ("calls", "bytes", "seconds"):
                values = [row[name] for row in rows if name in row]
                if len(values) == len(rows):
                    found[f"communication/{axis}/{operation}/{name}"] = max(values)
        return found

    def _ranks(self) -> Metrics:
        slowest = self.slowest
        return {"ranks/slowdown": slowest.slowdown, "ranks/slowest": slowest.rank}


def median_of_others(ordered: Sequence[float], one: float) -> float | None:
    """Of sorted values without one of them; None where it is alone. Without a list for each: a stage may have thousands
    of ranks."""
    count = len(ordered) - 1
    if count < 1:
        return None
    place = bisect_left(ordered, one)
    low, high = ((count - 1) // 2, count // 2)
    return sum(ordered[n if n < place else n + 1] for n in (low, high)) / 2


def _of_stage(stage: Sequence[RankReport], axis: str, operation: str) -> dict[str, float]:
    """Calls, bytes and, where every rank knows them, seconds: means over the stage's ranks."""
    of_rank: list[Mapping[str, Any]] = []
    for one in stage:
        calls = [call for call in one.collectives if (call.axis, call.operation) == (axis, operation)]
        of_rank.append(asdict(calls[0]) if calls else {"calls": 0, "bytes": 0, "seconds": 0.0})
    found = {name: mean(row[name] for row in of_rank) for name in ("calls", "bytes")}
    if all(row["seconds"] is not None for row in of_rank):
        found["seconds"] = mean(row["seconds"] for row in of_rank)
    return found
