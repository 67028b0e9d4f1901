"""The first step at which two runs' losses or gradient norms leave each other, and what happened before it.

Tolerances are those of two plans of one model (`parallel.promotion.loss_bounds`), which hold for the first tens of
steps: rounding in another order grows over hundreds of steps, so a late, small parting is no fault by itself. Runs with
other batch sizes are compared where both have seen as many tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parallel.promotion import loss_bounds
from telemetry.compare.attempts import QUIET, attempt_of
from telemetry.compare.runs import Row, Run, same_batches
from telemetry.tables import size

NORM_16_BIT = 0.1  # relative, as tests/engine/test_parity.py allows a gradient norm in bf16
LOSS, NORM = "train/loss", "train/grad_norm"
NAMES = {LOSS: "loss", NORM: "gradient norm"}
AT_ITS_STEP = ("bad step", "skipped step", "alert raised", "rank lost", "rollback")


@dataclass(frozen=True)
class Tolerance:
    """Relative and absolute distance that is allowed of each; the larger of the two counts."""

    loss: tuple[float, float]
    norm: tuple[float, float]

    def of(self, name: str) -> tuple[float, float]:
        return self.loss if name == LOSS else self.norm

    def allowed(self, name: str, value: float) -> float:
        relative, absolute = self.of(name)
        return max(absolute, relative * abs(value))


@dataclass(frozen=True)
class Divergence:
    """axis: step or tokens; metric, place, values, allowed: of the first that part, None where nothing does; agreed:
    the last place before it; for_good: the first place from which on all part; at_last: distance of the losses at the
    last shared place; shared: places that both have; note: what the reader must know of the comparison."""

    axis: str
    shared: Sequence[int]
    metric: str | None = None
    place: int | None = None
    steps: tuple[int, int] | None = None
    values: tuple[float, float] | None = None
    allowed: float | None = None
    agreed: int | None = None
    note: str | None = None
    for_good: int | None = None
    at_last: float | None = None


def tolerance_of(runs: Sequence[Run], *, loss: float | None = None, norm: float | None = None) -> Tolerance:
    """By the widest of the runs' number formats; loss, norm: relative, instead of these."""
    bounds = [_by_format(run.last.config) for run in runs]
    losses = max((one[0] for one in bounds), key=lambda pair: (pair[1], pair[0]))
    norms = max(one[1] for one in bounds)
    return Tolerance((loss, 0.0) if loss is not None else losses, (norm if norm is not None else norms, 0.0))


def _by_format(config: Mapping[str, Any]) -> tuple[tuple[float, float], float]:
    dtype = config.get("precision", {}).get("dtype", "fp32")
    layers = config.get("model", {}).get("num_layers", 1)
    return loss_bounds(dtype, num_layers=layers), 1e-5 if dtype == "fp32" else NORM_16_BIT


def divergence(first: Run, second: Run, tolerance: Tolerance) -> Divergence:
    """Of two runs' steps as they count."""
    if same_batches(first, second):
        return _first_apart("step", _by_step(first), _by_step(second), tolerance)
    batches = " and ".join("/".join(f"{n:,}" for n in run.tokens_per_step) for run in (first, second))
    note = f"steps of {batches} tokens: compared at equal tokens, where other batches were seen"
    return _first_apart("tokens", _by_tokens(first), _by_tokens(second), tolerance, note=note)


def _by_step(run: Run) -> dict[int, tuple[int, Row]]:
    return {step: (step, row) for step, row in run.steps.items()}


def _by_tokens(run: Run) -> dict[int, tuple[int, Row]]:
    return {row["tokens"]: (step, row) for step, row in run.steps.items() if "tokens" in row}


def _first_apart(
    axis: str,
    first: Mapping[int, tuple[int, Row]],
    second: Mapping[int, tuple[int, Row]],
    tolerance: Tolerance,
    *,
    note: str | None = None,
) -> Divergence:
    shared = sorted(first.keys() & second.keys())
    parted = {place: name for place in shared if (name := _apart(first[place][1], second[place][1], tolerance))}
    if not parted:
        return Divergence(axis, shared, agreed=max(shared, default=None), note=note)
    place, name = next(iter(parted.items()))
    (step, row), (other_step, other) = first[place], second[place]
    last_agreed = max((one for one in shared if one not in parted), default=-1)
    return Divergence(
        axis, shared, name, place, (step, other_step), (row[name], other[name]), tolerance.allowed(name, row[name]),
        agreed=max((one for one in shared if one < place), default=None), note=note,
        for_good=next((one for one in shared if one > last_agreed), None),
        at_last=abs(first[shared[-1]][1][LOSS] - second[shared[-1]][1][LOSS]),
    )  # fmt: skip


def _apart(row: Row, other: Row, tolerance: Tolerance) -> str | None:
    """The metric in which two rows part."""
    both = [name for name in (LOSS, NORM) if name in row and name in other]
    return next((n for n in both if not is_close(row[n], other[n], tolerance.allowed(n, row[n]))), None)


def is_close(value: float, other: float, allowed: float) -> bool:
    """Two values that are not finite in the same way agree."""
    if math.isfinite(value) and math.isfinite(other):
        return abs(value - other) <= allowed
    return value == other or (math.isnan(value) and math.isnan(other))


def distance_words(value: float, other: float, allowed: float) -> str:
    """How far they are apart, and what is allowed."""
    if math.isfinite(value) and math.isfinite(other):
        return f"{abs(value - other):.2g} apart, {allowed:.2g} is allowed"
    return "only one is a finite number" if math.isfinite(value) or math.isfinite(other) else "no numbers, unlike"


def events_before(run: Run, step: int, *, most: int = 5) -> list[Row]:
    """The nearest events on the way to a step as it counts, the latest last; alerts and bad steps of the step itself
    belong to it, its checkpoint does not."""
    begins = attempt_of(run.events, step)
    found = list(run.events[: begins + 1])
    for event in run.events[begins + 1 :]:
        if event["step"] > step:
            break
        if event["step"] < step or event.get("event") in AT_ITS_STEP:
            found.append(event)
    return nearest(found, most=most)


def nearest(events: Sequence[Row], *, most: int = 5) -> list[Row]:
    """The last of those that changed something."""
    return [event for event in events if event.get("event") not in QUIET][-most:]


def event_line(event: Row) -> str:
    """Time, step and what, in one line."""
    return f"{event.get('time', '')}  step {event.get('step', 0):>6}  {event_words(event)}"


def event_words(event: Row) -> str:
    """What, and the details that say something."""
    shown = {key: event[key] for key in DETAILS if event.get(key) not in (None, [], {})}
    if not shown and event.get("message"):
        shown = {"": event["message"]}
    details = ", ".join(f"{key} {_detail(key, value)}".strip() for key, value in shown.items())
    return f"{event.get('event')}: {details}" if details else str(event.get("event"))


def _detail(key: str, value: Any) -> str:
    if key == "git_commit":
        return f"{value[:12]}{'+changes' if value.endswith('+changes') else ''}"
    if key == "profile" and isinstance(value, dict):
        return f"{value.get('name')} v{value.get('version')}"
    if key == "changed" and isinstance(value, list):
        return ", ".join(f"{one[0]} {one[1]} -> {one[2]}" if len(one) == 3 else str(one) for one in value)
    return size(value) if key == "bytes" else str(value)


# What an event's line shows of it, in this order.
DETAILS = (
    "start", "git_commit", "checkpoint", "profile", "changed", "what", "loss", "samples", "alert", "slice", "value",
    "range", "severity", "outcome", "error", "bytes", "checksum", "bad_step", "passed_over",
)  # fmt: skip


def describe(found: Divergence, names: Sequence[str]) -> str:
    """In one or two lines."""
    unit = "step" if found.axis == "step" else "tokens"
    if not found.shared:
        return f"{names[0]} and {names[1]} share no {unit}: nothing to compare"
    lines = [found.note] if found.note else []
    if found.place is None:
        lines.append(
            f"losses and gradient norms agree at all {len(found.shared):,} shared places, {unit} {found.shared[0]:,} "
            f"to {found.shared[-1]:,}"
        )
        return "\n".join(lines)
    assert found.metric is not None and found.values is not None and found.allowed is not None
    until = "from the first on" if found.agreed is None else f"after agreeing up to {unit} {found.agreed:,}"
    lines.append(
        f"{NAMES[found.metric]} parts at {unit} {found.place:,}, {until}: {found.values[0]:.8g} and "
        f"{found.values[1]:.8g}, {distance_words(*found.values, found.allowed)}"
    )
    assert found.at_last is not None
    losses = f"are {found.at_last:.2g} apart" if math.isfinite(found.at_last) else "are not both finite numbers"
    last = f"at the last shared place, {unit} {found.shared[-1]:,}, the losses {losses}"
    if found.for_good is None:
        last = f"later they agree again; {last}"
    elif found.for_good > found.place:
        last = f"they come together again and part for good at {unit} {found.for_good:,}; {last}"
    lines.append(last)
    return "\n".join(lines)
