"""One run in a dozen numbers: how it ended, speed, memory, bubble, plan; and the table that sets runs side by side.

Times and rates are medians over steps, the first two of a run left out (they warm up), or of those there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from telemetry.compare.runs import Row, Run
from telemetry.tables import size, table

WARM_UP = 2  # steps


@dataclass(frozen=True)
class Outcome:
    """None: the run did not measure it. loss, validation_loss: the last; memory: of the largest rank; bubble,
    exposed: shares of a step; utilisation: of the data sheet's peak, or of the matrix rate measured there."""

    ending: str
    error: str | None
    plan: str
    profile: str | None
    steps: int
    train_iters: int | None
    tokens: float | None
    loss: float | None
    validation_loss: float | None
    best_validation_loss: float | None
    tokens_per_s: float | None
    tokens_per_s_per_device: float | None
    step_time_s: float | None
    mfu: float | None
    mfu_of_measured_rate: float | None
    memory_bytes: float | None
    bubble: float | None
    imbalance: float | None
    exposed: float | None
    skipped: int
    rollbacks: int
    starts: int
    alerts: int

    @property
    def progress(self) -> str:
        return f"{self.steps:,}" if self.train_iters is None else f"{self.steps:,} of {self.train_iters:,}"


def outcome(run: Run) -> Outcome:
    """Of what the run left so far."""
    rows, evaluations = list(run.steps.values()), list(run.evaluations.values())
    validation = [row["validation/loss"] for row in evaluations]
    profile = run.last.identity.get("profile") or {}
    return Outcome(
        ending=run.ending,
        error=run.error,
        plan=plan_label(run),
        profile=f"{profile['name']} v{profile['version']}" if {"name", "version"} <= profile.keys() else None,
        steps=max(run.steps, default=0),
        train_iters=run.last.config.get("train", {}).get("train_iters"),
        tokens=rows[-1].get("tokens") if rows else None,
        loss=rows[-1]["train/loss"] if rows else None,
        validation_loss=validation[-1] if validation else None,
        best_validation_loss=min(filter(math.isfinite, validation), default=None),
        tokens_per_s=typical(run, "train/tokens_per_s"),
        tokens_per_s_per_device=typical(run, "train/tokens_per_s_per_device"),
        step_time_s=typical(run, "train/step_time_s"),
        mfu=typical(run, "train/mfu"),
        mfu_of_measured_rate=typical(run, "train/mfu_of_measured_rate"),
        memory_bytes=peak_bytes(run),
        bubble=typical(run, "pipeline/bubble") if _gathered(run) else _of_first_steps(run, "bubble"),
        imbalance=typical(run, "pipeline/imbalance"),
        exposed=typical(run, "communication/exposed_share"),
        skipped=sum(bool(row.get("train/skipped")) for row in rows),
        rollbacks=sum(event.get("event") == "rollback" for event in run.events),
        starts=max(len(run.starts), sum(event.get("event") == "start" for event in run.events)),
        alerts=sum(event.get("event") == "alert raised" for event in run.events),
    )


def typical(run: Run, name: str) -> float | None:
    """The median of a metric over the steps that have it, warm-up left out where others have it."""
    found = {step: row[name] for step, row in run.steps.items() if _is_number(row.get(name))}
    settled = [value for step, value in found.items() if step > WARM_UP]
    return median(settled or found.values()) if found else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def peak_bytes(run: Run) -> float | None:
    """The most that a rank held: of all ranks where it was gathered, else of rank 0; with its first steps' ranks."""
    rows: Iterable[Row] = run.steps.values()
    found = [row["memory/peak_bytes"] for row in rows if _is_number(row.get("memory/peak_bytes"))]
    found += (run.prediction or {}).get("peak_bytes") or []
    found = found or [row["train/peak_memory_bytes"] for row in rows if "train/peak_memory_bytes" in row]
    return max(found, default=None)


def _gathered(run: Run) -> bool:
    return any("pipeline/bubble" in row for row in run.steps.values())


def _of_first_steps(run: Run, name: str) -> float | None:
    """What the first steps measured (prediction.json): the mean of the stages."""
    stages = (run.prediction or {}).get("stages") or []
    found = [stage[name]["measured"] for stage in stages if _is_number((stage.get(name) or {}).get("measured"))]
    return sum(found) / len(found) if found else None


def plan_label(run: Run) -> str:
    """tp2 pp2 dp1 zero1 1f1b ..., as far as it is known: without plan.json of the config's knobs."""
    plan, config = run.last.plan, run.last.config
    parallel = config.get("parallel", {})
    tp = plan.get("tensor_model_parallel_size", parallel.get("tp"))
    pp = plan.get("pipeline_model_parallel_size", parallel.get("pp"))
    if tp is None or pp is None:
        return "unknown"
    parts = [f"tp{tp}", f"pp{pp}"]
    parts += [f"dp{plan['data_parallel_size']}"] if "data_parallel_size" in plan else []
    parts.append(f"zero{plan.get('zero_stage', config.get('zero', {}).get('stage'))}")
    parts += ["sp"] * bool(plan.get("sequence_parallel", parallel.get("sequence_parallel")))
    parts += [str(plan.get("schedule", parallel.get("schedule")))] if pp > 1 else []
    recompute = plan.get("recompute", parallel.get("recompute", "none"))
    return " ".join(parts + ([f"recompute {recompute}"] if recompute != "none" else []))


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _seconds(value: float) -> str:
    return f"{value:.4g} s"


def _loss(value: float) -> str:
    return f"{value:.4f}"


# (label, field, how a value reads, whether the ratio to the first run says something)
LINES: tuple[tuple[str, str, Callable[[Any], str], bool], ...] = (
    ("outcome", "ending", str, False),
    ("plan", "plan", str, False),
    ("profile", "profile", str, False),
    ("steps", "progress", str, False),
    ("tokens", "tokens", _count, False),
    ("train loss", "loss", _loss, True),
    ("validation loss", "validation_loss", _loss, True),
    ("best validation loss", "best_validation_loss", _loss, True),
    ("tokens/s", "tokens_per_s", _count, True),
    ("tokens/s a device", "tokens_per_s_per_device", _count, True),
    ("step time", "step_time_s", _seconds, True),
    ("MFU", "mfu", _share, True),
    ("MFU of measured rate", "mfu_of_measured_rate", _share, True),
    ("peak memory", "memory_bytes", size, True),
    ("bubble", "bubble", _share, True),
    ("stage imbalance", "imbalance", lambda value: f"{value:.3f}", True),
    ("exposed communication", "exposed", _share, True),
    ("skipped steps", "skipped", _count, False),
    ("rollbacks", "rollbacks", _count, False),
    ("starts", "starts", _count, False),
    ("alerts raised", "alerts", _count, False),
)


MOST = 100.0  # times the first run's, or a part of it: beyond, one of the two is as good as nothing


@dataclass(frozen=True)
class Line:
    """One quantity of all runs: as text, and as a ratio to the first run's; None where that says nothing."""

    label: str
    texts: Sequence[str]
    ratios: Sequence[float | None]


def lines(outcomes: Sequence[Outcome]) -> list[Line]:
    """What at least one run has."""
    found = []
    for label, name, text, compares in LINES:
        values = [getattr(one, name) for one in outcomes]
        if any(value is not None for value in values):
            texts = ["-" if value is None else text(value) for value in values]
            ratios = [
                _ratio(value, values[0]) if compares and shown != texts[0] and _meet(name, one, outcomes[0]) else None
                for value, shown, one in zip(values, texts, outcomes, strict=True)
            ]
            found.append(Line(label, texts, ratios))
    return found


def _meet(name: str, one: Outcome, first: Outcome) -> bool:
    """Losses after other numbers of steps are no pair."""
    return name not in ("loss", "validation_loss", "best_validation_loss") or one.steps == first.steps


def _ratio(value: float | None, first: float | None) -> float | None:
    if not (_is_number(value) and _is_number(first)) or not first:
        return None
    assert value is not None
    ratio = value / first
    return ratio if 1 / MOST <= ratio <= MOST else None


def outcome_table(runs: Sequence[Run]) -> str:
    """Quantities downwards, runs sideways, with the ratio to the first behind each number."""
    rows = []
    for line in lines([outcome(run) for run in runs]):
        cells = [
            text if ratio is None or f"{ratio - 1:+.1%}" in ("+0.0%", "-0.0%") else f"{text} ({ratio - 1:+.1%})"
            for text, ratio in zip(line.texts, line.ratios, strict=True)
        ]
        rows.append([line.label, *cells])
    return table(["", *(run.name for run in runs)], rows)
