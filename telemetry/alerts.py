"""Alert rules over the steps of a run: a rule is raised once and cleared once in each slice that it watches.

Raised: of the last m observations at least n lie outside the normal range. Cleared: fewer than n do, and at least n lie
inside. A bound is inside; a value that is not finite is outside of every range. A step that has no such metric, or
whose reference is not known, is no observation: nothing changes.

Values outside never enter the median that `recent` compares with, so a lasting change stays raised until it is gone. A
step that comes again (a restart, a rollback) replaces the observations from it on; what was raised stays raised until
new observations clear it. Under another plan all slices but the run's begin anew.

Pure Python, no files: `telemetry.alert_history` feeds it what a folder holds, `telemetry.alert_monitor` a live run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from conf.schema import AlertCompared, AlertReference, AlertRule, AlertSlice, NormalRange
from parallel.expectation import Expectation
from telemetry.alert_text import cleared_text, gone_text, raised_text
from telemetry.alert_values import Row, Value, values

RAISED, CLEARED = "alert raised", "alert cleared"
Event = dict[str, Any]  # a row of timeline.jsonl but for its time
Range = tuple[float | None, float | None]


@dataclass
class Series:
    """One rule in one slice. outside: (step, whether) of the last m observations; normal: those in the median."""

    outside: deque[tuple[int, bool]]
    normal: deque[tuple[int, float]]
    raised: bool = False
    observations: int = 0

    def forget_from(self, step: int) -> None:
        for kept in (self.outside, self.normal):
            while kept and kept[-1][0] >= step:
                kept.pop()


class Alerts:
    """alerts.begin(expectation); then alerts.observe(row, ranks, step) for each step -> what was raised or cleared."""

    def __init__(self, rules: Mapping[str, AlertRule]) -> None:
        self.rules = dict(rules)
        self.series: dict[tuple[str, str], Series] = {}
        self.expectation: Expectation | None = None
        self.last_step = 0

    def begin(self, expectation: Expectation) -> list[Event]:
        """A start of the run, under this plan."""
        before, self.expectation = self.expectation, expectation
        if before is None or before.identity == expectation.identity:
            return []
        events = []
        for (name, place), series in list(self.series.items()):
            rule = self.rules[name]
            if rule.slice is AlertSlice.run:
                continue
            if series.raised:
                events.append(_event(CLEARED, name, rule, place, self.last_step, None, None, gone_text(name, place)))
            del self.series[name, place]
        return events

    def observe(self, row: Row, ranks: Sequence[Row] | None, step: int) -> list[Event]:
        """One row of metrics.jsonl, with its line of ranks.jsonl where there is one."""
        assert self.expectation is not None
        again = step == self.last_step and "train/loss" in row  # else an evaluation after its step
        if step < self.last_step or again:
            for series in self.series.values():
                series.forget_from(step)
        self.last_step = step
        events = []
        for name, rule in self.rules.items():
            for value in values(rule, row, ranks, plan=self.expectation.plan):
                event = self._observe(name, rule, value, step)
                if event is not None:
                    events.append(event)
        return events

    def _observe(self, name: str, rule: AlertRule, value: Value, step: int) -> Event | None:
        series = self._series(name, rule, value.slice)
        reference = self._reference(rule, value, series)
        bounds = bounds_of(rule.normal, reference)
        is_finite = math.isfinite(value.value)
        if is_finite and bounds is None:
            if rule.normal.relative_to is AlertReference.recent:  # it becomes the reference
                series.normal.append((step, value.value))
            return None
        low, high = bounds or (None, None)
        inside = is_finite and (low is None or value.value >= low) and (high is None or value.value <= high)
        if inside and rule.normal.relative_to is AlertReference.recent:
            series.normal.append((step, value.value))
        series.outside.append((step, not inside))
        series.observations += 1
        return _changed(series, name, rule, value, step, (low, high), reference)

    def _series(self, name: str, rule: AlertRule, place: str) -> Series:
        key = (name, place)
        if key not in self.series:
            self.series[key] = Series(deque(maxlen=rule.persistence.m), deque(maxlen=rule.normal.window))
        return self.series[key]

    def _reference(self, rule: AlertRule, value: Value, series: Series) -> float | None:
        kind = rule.normal.relative_to
        if kind is AlertReference.recent:
            enough = 2 * len(series.normal) >= rule.normal.window
            return median(one for _, one in series.normal) if enough else None
        if kind is AlertReference.peers:
            return value.peers
        if kind is AlertReference.absolute:
            return None
        assert self.expectation is not None
        return self.expectation.number(kind, rule.slice, rule.metric, value.index)

    def raised(self) -> list[tuple[str, str]]:
        """(rule, slice) of what is raised now."""
        return [key for key, series in self.series.items() if series.raised]

    def set_raised(self, keys: Sequence[tuple[str, str]]) -> None:
        """What the timeline says is raised, whatever the values say: a rule may have changed since."""
        for series in self.series.values():
            series.raised = False
        for name, place in keys:
            if name in self.rules:
                self._series(name, self.rules[name], place).raised = True


def bounds_of(normal: NormalRange, reference: float | None) -> Range | None:
    """The normal range in the metric's own unit; None where its reference is not known or nothing to divide by."""
    if normal.relative_to is AlertReference.absolute:
        return normal.min, normal.max
    if reference is None or not math.isfinite(reference):
        return None
    if normal.compared_as is AlertCompared.difference:
        return tuple(None if one is None else reference + one for one in (normal.min, normal.max))  # type: ignore[return-value]
    if reference <= 0:
        return None
    return tuple(None if one is None else reference * one for one in (normal.min, normal.max))  # type: ignore[return-value]


def _changed(
    series: Series, name: str, rule: AlertRule, value: Value, step: int, bounds: Range, reference: float | None
) -> Event | None:
    """The event where this observation raises or clears."""
    n = rule.persistence.n
    outside = sum(is_outside for _, is_outside in series.outside)
    if not series.raised and outside >= n:
        series.raised = True
        text = raised_text(name, rule, value, bounds, reference, outside=outside, of=len(series.outside))
        return _event(RAISED, name, rule, value.slice, step, value.value, bounds, text)
    if series.raised and outside < n and len(series.outside) - outside >= n:
        series.raised = False
        text = cleared_text(name, rule, value, bounds)
        return _event(CLEARED, name, rule, value.slice, step, value.value, bounds, text)
    return None


def _event(
    what: str, name: str, rule: AlertRule, place: str, step: int, value: float | None, bounds: Range | None, text: str
) -> Event:
    return {
        "event": what, "step": step, "alert": name, "slice": place, "metric": rule.metric, "value": value,
        "range": list(bounds or (None, None)), "severity": rule.severity.value, "owner": rule.owner,
        "mitigation": rule.mitigation, "action": rule.action.value, "message": text,
    }  # fmt: skip


def silent(rules: Mapping[str, AlertRule], expectation: Expectation) -> dict[str, str]:
    """Rules that cannot judge anything in this run -> why."""
    return {name: reason for name, rule in rules.items() for reason in _silent(rule, expectation)}


def _silent(rule: AlertRule, expectation: Expectation) -> Iterator[str]:
    kind = rule.normal.relative_to
    if kind not in (AlertReference.prediction, AlertReference.observation):
        return
    places: Sequence[Any] = [None]
    if rule.slice in (AlertSlice.stage, AlertSlice.rank):
        places = range(len(expectation.predicted.get("memory", ())))
    elif rule.slice is AlertSlice.axis:
        places = sorted({axis for axes in expectation.predicted.get("communication", ()) for axis in axes})
    if all(
        bounds_of(rule.normal, expectation.number(kind, rule.slice, rule.metric, place)) is None for place in places
    ):
        yield kind.value
