"""A run's folder -> what its alert rules saw, in the order in which they saw it: starts with their plans, rows, ranks.

Each start notes on the timeline (event "alerts") how many lines metrics.jsonl and ranks.jsonl had by then, so that a
row is judged against the plan it was trained under. A line that a killed start left half-written is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from parallel.expectation import Expectation
from telemetry.alert_values import Row
from telemetry.alerts import CLEARED, RAISED, Alerts, Event
from telemetry.jsonl import lines

ON = "alerts"  # the event of a start on the timeline


@dataclass(frozen=True)
class Seen:
    """One row of metrics.jsonl, with the ranks gathered in the same step."""

    row: Row
    ranks: list[Row] | None


def history(folder: Path) -> Iterator[Expectation | Seen]:
    """In the order of the files, a line at a time: those of a long run are large. ValueError for no run's folder."""
    starts = _starts(folder)
    rows, gathered = lines(folder / "metrics.jsonl"), _Gathered(folder / "ranks.jsonl")
    ends: list[Any] = [*((first, first_rank) for _, first, first_rank in starts[1:]), (None, None)]
    for (expectation, first, _), (end, rank_end) in zip(starts, ends, strict=True):
        yield expectation
        for row in islice(rows, None if end is None else end - first):
            if row is not None:
                yield Seen(row, gathered.of_step(row["step"], rank_end) if "train/loss" in row else None)
        gathered.skip_to(rank_end)


class _Gathered:
    """ranks.jsonl beside metrics.jsonl: its lines come in the order of the rows that they belong to."""

    def __init__(self, path: Path) -> None:
        self.lines = lines(path)
        self.number = 0  # lines before `held`
        self.held: Any = next(self.lines, _END)

    def of_step(self, step: int, end: int | None) -> list[Row] | None:
        while self.held is None:  # half-written
            self._advance()
        if self.held is _END or self.held["step"] != step or (end is not None and self.number >= end):
            return None
        found = self.held["ranks"]
        self._advance()
        return found

    def skip_to(self, end: int | None) -> None:
        """Lines whose row a killed start did not get to write."""
        while end is not None and self.number < end:
            self._advance()

    def _advance(self) -> None:
        self.held = next(self.lines, _END)
        self.number += 1


_END = object()


def run_through(alerts: Alerts, folder: Path) -> list[Event]:
    """Feed the rules everything that the folder holds; what they raised and cleared."""
    events: list[Event] = []
    for one in history(folder):
        if isinstance(one, Expectation):
            events += alerts.begin(one)
        else:
            events += alerts.observe(one.row, one.ranks, one.row["step"])
    return events


def still_raised(folder: Path) -> dict[tuple[str, str], Event]:
    """(alert, slice) -> its event, of what the timeline raised and did not clear."""
    found: dict[tuple[str, str], Event] = {}
    for event in lines(folder / "timeline.jsonl"):
        if event is not None and event["event"] in (RAISED, CLEARED):
            key = (event["alert"], event["slice"])
            found.pop(key, None)
            if event["event"] == RAISED:
                found[key] = event
    return found


def count_lines(path: Path) -> int:
    return sum(1 for _ in lines(path))


def _starts(folder: Path) -> list[tuple[Expectation, int, int]]:
    """(expectation, lines of metrics.jsonl, lines of ranks.jsonl before it) of each start."""
    found, start = [], 0
    for event in lines(folder / "timeline.jsonl"):
        if event is not None and event["event"] == "start":
            start = event.get("start", start + 1)
        elif event is not None and event["event"] == ON:
            found.append((expectation_of(folder, start), event["rows"], event["rank_rows"]))
    if not found:
        return [(expectation_of(folder), 0, 0)]
    first = found[0][0]
    return found if found[0][1:] == (0, 0) else [(first, 0, 0), *found]


def expectation_of(folder: Path, start: int | None = None) -> Expectation:
    """Of one start of the run; of its last where the folder does not keep them apart."""
    kept = folder / "starts" / f"{start}.json"
    try:
        if start is not None and kept.exists():
            one = json.loads(kept.read_text())
            return Expectation.of(one["plan"], one["config"])
        plan, config = (json.loads((folder / name).read_text()) for name in ("plan.json", "config.json"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} is no run's folder with plan.json and config.json: {error}") from None
    return Expectation.of(plan, config)
