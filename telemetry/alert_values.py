"""A step's row and its ranks -> what a rule watches: one value a slice. Keys as in metrics.jsonl, ranks.jsonl."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from conf.schema import AlertRule, AlertSlice
from telemetry.ranks import median_of_others

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Value:
    """slice: "run", "stage 1", "rank 3", "axis tensor", "plan tp2_pp2"; index: what the expectation goes by.

    where: the slice for a reader; peers: the median of the other ranks of the same stage, where there are any.
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
    for key, stage in _stage_keys(tuple(row), metric):
        number = _number(row[key])
        if number is not None:
            yield Value(f"stage {stage}", number, stage)


def _axes(metric: str, row: Row) -> Iterator[Value]:
    """communication/seconds: the sum over the operations of communication/AXIS/OPERATION/seconds."""
    sums: dict[str, float] = {}
    for key, axis in _axis_keys(tuple(row), metric):
        number = _number(row[key])
        if number is not None:
            sums[axis] = sums.get(axis, 0.0) + number
    for axis, total in sums.items():
        yield Value(f"axis {axis}", total, axis)


# A run's rows have few sets of keys (with ranks gathered or not, evaluations), and a restart goes through all its rows.
@lru_cache(maxsize=128)
def _stage_keys(keys: tuple[str, ...], metric: str) -> list[tuple[str, int]]:
    start = f"{metric}/stage"
    return [(key, int(key[len(start) :])) for key in keys if key.startswith(start) and key[len(start) :].isdigit()]


@lru_cache(maxsize=128)
def _axis_keys(keys: tuple[str, ...], metric: str) -> list[tuple[str, str]]:
    first, _, last = metric.partition("/")
    form = re.compile(f"{re.escape(first)}/([^/]+)/[^/]+/{re.escape(last)}")
    return [(key, found[1]) for key in keys if (found := form.fullmatch(key))]


def _ranks(metric: str, ranks: Sequence[Row]) -> Iterator[Value]:
    numbers = [(rank, _number(rank.get(metric))) for rank in ranks]
    known = [(rank, number) for rank, number in numbers if number is not None]
    stages: dict[int, list[float]] = {}
    for rank, number in known:
        if math.isfinite(number):
            stages.setdefault(rank["pp"], []).append(number)
    for stage in stages.values():
        stage.sort()
    for rank, number in known:
        peers = median_of_others(stages[rank["pp"]], number) if math.isfinite(number) else None
        yield Value(f"rank {rank['rank']}", number, rank["pp"], f"rank {rank['rank']} on {rank['host']}", peers)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (bool, int, float)) else None
