"""A step's row and its ranks -> what a rule watches: one value a slice. Keys as in metrics.jsonl, ranks.jsonl."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from conf.schema import AlertRule, AlertSlice

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Value:
    """slice: "run", "stage 1", "rank 3", "axis tensor", "plan tp2_pp2"; index: what the expectation goes by.

    where: the slice for a reader; peers: the median of the ranks of the same stage, where there are others.
    """

    slice: str
    value: float
    index: Any = None
    where: str = ""
    peers: float | None = None


def values(rule: AlertRule, row: Row, ranks: Sequence[Row] | None, *, plan: str) -> Iterator[Value]:
    """Slices whose metric this step does not have are left out: that is no observation."""
    if rule.slice in (AlertSlice.run, AlertSlice.plan):
        number = _number(row.get(rule.metric))
        if number is not None:
            yield Value("run" if rule.slice is AlertSlice.run else f"plan {plan}", number)
    elif rule.slice is AlertSlice.stage:
        yield from _stages(rule.metric, row)
    elif rule.slice is AlertSlice.axis:
        yield from _axes(rule.metric, row)
    else:
        yield from _ranks(rule.metric, ranks or ())


def _stages(metric: str, row: Row) -> Iterator[Value]:
    start = f"{metric}/stage"
    for key, value in row.items():
        if key.startswith(start) and key[len(start) :].isdigit():
            number, stage = _number(value), int(key[len(start) :])
            if number is not None:
                yield Value(f"stage {stage}", number, stage)


def _axes(metric: str, row: Row) -> Iterator[Value]:
    """communication/seconds: the sum over the operations of communication/AXIS/OPERATION/seconds."""
    first, _, last = metric.partition("/")
    form = re.compile(f"{re.escape(first)}/([^/]+)/[^/]+/{re.escape(last)}")
    sums: dict[str, float] = {}
    for key, value in row.items():
        found = form.fullmatch(key) if key.startswith(first) else None
        number = _number(value)
        if found is not None and number is not None:
            sums[found[1]] = sums.get(found[1], 0.0) + number
    for axis, total in sums.items():
        yield Value(f"axis {axis}", total, axis)


def _ranks(metric: str, ranks: Sequence[Row]) -> Iterator[Value]:
    numbers = [(rank, _number(rank.get(metric))) for rank in ranks]
    known = [(rank, number) for rank, number in numbers if number is not None]
    stages: dict[int, list[float]] = {}
    for rank, number in known:
        stages.setdefault(rank["pp"], []).append(number)
    for rank, number in known:
        stage = stages[rank["pp"]]
        peers = median(stage) if len(stage) > 1 else None
        yield Value(f"rank {rank['rank']}", number, rank["pp"], f"rank {rank['rank']} on {rank['host']}", peers)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (bool, int, float)) else None
