"""Which curves are drawn, over which axes, and their points: shared by the page and the pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from telemetry.compare.runs import Row, Run

AXES = {"step": "optimizer step", "tokens": "tokens", "flops": "model FLOPs", "hours": "hours of training"}
MOST_POINTS = 2000  # of one curve on the page; more pixels than that no screen has


@dataclass(frozen=True)
class Chart:
    """title, unit; names: the first that a run has is drawn; logarithmic: drawn so at first."""

    key: str
    title: str
    unit: str
    names: tuple[str, ...]
    logarithmic: bool = False
    evaluations: bool = False


CHARTS = (
    Chart("loss", "Training loss", "nats/token", ("train/loss",)),
    Chart("validation", "Validation loss", "nats/token", ("validation/loss",), evaluations=True),
    Chart("norm", "Gradient norm", "", ("train/grad_norm",), logarithmic=True),
    Chart("rate", "Learning rate", "", ("train/learning_rate",)),
    Chart("speed", "Speed", "tokens/s", ("train/tokens_per_s",)),
    Chart("utilisation", "MFU", "%", ("train/mfu", "train/mfu_of_measured_rate")),
    Chart("time", "Step time", "s", ("train/step_time_s",)),
    Chart("data", "Waiting for data", "% of a step", ("train/data_share",)),
    Chart("memory", "Peak memory, largest rank", "GB", ("memory/peak_bytes", "train/peak_memory_bytes")),
    Chart("bubble", "Pipeline bubble", "% of a step", ("pipeline/bubble",)),
    Chart("imbalance", "Stage imbalance", "slowest / mean", ("pipeline/imbalance",)),
    Chart("exposed", "Exposed communication", "% of a step", ("communication/exposed_share",)),
    Chart("overlap", "Hidden communication", "% of it", ("communication/overlap_share",)),
    Chart("slowdown", "Slowest rank", "x median", ("ranks/slowdown",)),
)  # fmt: skip
SCALE = {"%": 100.0, "% of it": 100.0, "% of a step": 100.0, "GB": 1e-9}


def name_of(chart: Chart, runs: Sequence[Run]) -> str | None:
    """The one metric that is drawn of all runs: the first that each has that has any, so that like meets like."""
    having = [[name for name in chart.names if _has(run, chart, name)] for run in runs]
    common = [name for name in chart.names if all(name in names for names in having if names)]
    return common[0] if common and any(having) else None


def _has(run: Run, chart: Chart, name: str) -> bool:
    return any(isinstance(row.get(name), (int, float)) for row in rows_of(run, chart).values())


def rows_of(run: Run, chart: Chart) -> Mapping[int, Row]:
    return run.evaluations if chart.evaluations else run.steps


def points(run: Run, chart: Chart, name: str, *, most: int = MOST_POINTS) -> list[dict[str, float | None]]:
    """{axis: place, y: value} of each step that has it, in the chart's unit; y None where it is not finite."""
    scale = SCALE.get(chart.unit, 1.0)
    found: list[dict[str, float | None]] = []
    for step, row in rows_of(run, chart).items():
        value = row.get(name)
        if isinstance(value, (int, float)):
            at = {axis: _finite(row.get(axis, _hours_of(run, step) if axis == "hours" else None)) for axis in AXES}
            found.append(at | {"y": _finite(scale * value)})
    return thinned(found, most=most)


def _hours_of(run: Run, step: int) -> float | None:
    """Of an evaluation row that lacks them: those of its step's training row."""
    return run.steps.get(step, {}).get("hours", 0.0 if step == 0 else None)


def _finite(value: float | None) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def thinned(found: list[dict[str, float | None]], *, most: int) -> list[dict[str, float | None]]:
    """At most about `most` points: of each bucket the lowest and the highest, so that no spike is lost; what is not
    finite is kept."""
    if len(found) <= most:
        return found
    size = math.ceil(2 * len(found) / most)
    kept = []
    for first in range(0, len(found), size):
        bucket = found[first : first + size]
        values = [(one["y"], place) for place, one in enumerate(bucket) if one["y"] is not None]
        chosen = {place for place, one in enumerate(bucket) if one["y"] is None}
        if values:
            chosen |= {min(values)[1], max(values)[1]}
        kept += [bucket[place] for place in sorted(chosen)]
    return kept
