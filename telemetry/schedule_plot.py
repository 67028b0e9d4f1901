"""A simulated pipeline step as PNG: a row for each rank, a box for each pass with its micro-batch, idle time grey.

A step of many micro-batches is cut: its beginning and its end are drawn, with the steady part between them left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallel.timeline import Event, Timeline
from telemetry.trace import Span

_IDLE, _SPAN = "#e4e4e4", "#b07cc6"
_COLOURS = {  # by kind; each chunk of a rank (dualpipev: both of its stages) a shade, the first one the darkest
    "forward": ("#3b75af", "#7fb0dc", "#a9cbe8", "#cbe0f2"),
    "backward": ("#d9822b", "#f1b46b", "#f6cd9b", "#fae3c6"),
}
_PASSES_SHOWN = 72  # along a row: with more, boxes get too narrow to read
_HEIGHT = 0.86  # of a row


def plot_timeline(timeline: Timeline, image: Path, *, spans: Sequence[Span] = ()) -> None:
    """Draw `timeline` into `image`; `spans`: what else a rank does, as a thin line along the foot of its row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ranks = len(timeline.busy_s)
    end_s = max([timeline.step_s, *(span.end_s for span in spans)])
    windows = _windows(timeline, end_s)
    unit, scale = _unit(end_s)
    row_inches = max(0.16, min(0.45, 14 / ranks))
    figure, panels = pyplot.subplots(
        1, len(windows), figsize=(15, 1.5 + row_inches * ranks), dpi=120, sharey=True, squeeze=False,
        gridspec_kw={"wspace": 0.03},
    )  # fmt: skip
    height = figure.get_figheight()
    figure.subplots_adjust(left=0.055, right=0.935, top=1 - 0.45 / height, bottom=0.85 / height)
    for axes, (start, end) in zip(panels[0], windows, strict=True):
        _draw_rows(axes, timeline, spans, start, end, scale)
        axes.set_xlim(start * scale, end * scale)
        axes.set_ylim(ranks - 0.5, -0.5)
        axes.set_xlabel(f"time ({unit})")
        axes.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    _label_rows(panels[0][0], panels[0][-1], timeline)
    if len(windows) > 1:
        _mark_cut(*panels[0])
    figure.suptitle(_title(timeline, scale, unit), fontsize=11, y=1 - 0.12 / height, va="top")
    figure.legend(handles=_legend(timeline, spans), loc="lower center", ncols=8, fontsize=8, frameon=False)
    figure.savefig(image)
    pyplot.close(figure)


def _label_rows(first: Any, last: Any, timeline: Timeline) -> None:
    """Ranks on the left, their idle share on the right; of many rows every second, third, ..."""
    ranks = len(timeline.busy_s)
    labelled = range(0, ranks, ranks // 32 + 1)
    first.set_yticks(labelled, [f"rank {rank}" for rank in labelled], fontsize=8)
    across = last.get_yaxis_transform()
    for rank in labelled:
        last.text(1.005, rank, f"{timeline.bubble(rank):.1%} idle", fontsize=8, va="center", transform=across)


def _title(timeline: Timeline, scale: float, unit: str) -> str:
    return (
        f"{timeline.schedule}, {len(timeline.busy_s)} ranks, {timeline.num_micro_batches} micro-batches: "
        f"step {timeline.step_s * scale:.4g} {unit}, mean bubble {timeline.mean_bubble:.1%}, "
        f"imbalance {timeline.imbalance:.3f} (busiest rank / mean)"
    )


def _unit(seconds: float) -> tuple[str, float]:
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return unit, scale
    return "µs", 1e6


def _windows(timeline: Timeline, end_s: float) -> list[tuple[float, float]]:
    """The stretches of time to draw: all, or beginning and end, where the longest row has too many passes."""
    longest = len(timeline.events) / len(timeline.busy_s)
    # What fills and drains the pipeline should be in sight: about two passes for each rank at either end.
    share = max(_PASSES_SHOWN, 6 * len(timeline.busy_s)) / longest / 2
    if share >= 0.5:
        return [(0.0, end_s)]
    return [(0.0, share * timeline.step_s), (end_s - share * timeline.step_s, end_s)]


def _draw_rows(axes: Any, timeline: Timeline, spans: Sequence[Span], start: float, end: float, scale: float) -> None:
    """Boxes of what runs between start and end, in two collections: one patch each would take minutes."""
    from matplotlib.collections import PolyCollection

    ranks = len(timeline.busy_s)
    idle = [_box(rank, 0.0, timeline.step_s, scale) for rank in range(ranks)]
    axes.add_collection(PolyCollection(idle, facecolors=_IDLE, linewidths=0))
    seen = [event for event in timeline.events if event.end_s > start and event.start_s < end]
    boxes = [_box(event.rank, event.start_s, event.end_s, scale) for event in seen]
    colours = [_colour(event, timeline) for event in seen]
    edge = 0.6 if _inches(axes, start, end) * min(e.end_s - e.start_s for e in seen) > 0.03 else 0
    axes.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors="white", linewidths=edge))
    beside = [_box(span.rank, span.start_s, span.end_s, scale, top=0.28) for span in spans]
    axes.add_collection(PolyCollection(beside, facecolors=_SPAN, linewidths=0))
    _number(axes, seen, colours, start, end, scale)


def _box(rank: int, start_s: float, end_s: float, scale: float, *, top: float = -_HEIGHT / 2) -> list[Any]:
    left, right, foot = start_s * scale, end_s * scale, rank + _HEIGHT / 2
    return [(left, rank + top), (right, rank + top), (right, foot), (left, foot)]


def _chunk(event: Event, timeline: Timeline) -> int:
    return event.stage // len(timeline.busy_s)


def _colour(event: Event, timeline: Timeline) -> str:
    shades = _COLOURS[event.kind]
    return shades[_chunk(event, timeline) % len(shades)]


def _inches(axes: Any, start: float, end: float) -> float:
    """Of paper, a second."""
    return axes.get_position().width * axes.figure.get_figwidth() / (end - start)


def _number(axes: Any, events: Sequence[Event], colours: Sequence[str], start: float, end: float, scale: float) -> None:
    """Micro-batch numbers in the boxes that have room for them."""
    inches = _inches(axes, start, end)
    for event, colour in zip(events, colours, strict=True):
        middle = (event.start_s + event.end_s) / 2
        size = min(8.0, (event.end_s - event.start_s) * inches * 72 / (0.72 * max(2, len(str(event.micro_batch)))))
        if size >= 4.5 and start < middle < end:
            axes.text(
                middle * scale, event.rank, str(event.micro_batch), fontsize=size, ha="center", va="center",
                color="white" if colour == _COLOURS["forward"][0] else "black", clip_on=True,
            )  # fmt: skip


def _mark_cut(left: Any, right: Any) -> None:
    """Two short strokes where time is left out."""
    stroke = {"marker": [(-0.5, -1), (0.5, 1)], "markersize": 9, "linestyle": "none", "color": "k", "clip_on": False}
    left.plot([1], [0], transform=left.transAxes, **stroke)
    right.plot([0], [0], transform=right.transAxes, **stroke)


def _legend(timeline: Timeline, spans: Sequence[Span]) -> list[Any]:
    from matplotlib.patches import Patch

    chunks = max(_chunk(event, timeline) for event in timeline.events) + 1
    handles = []
    for kind, shades in _COLOURS.items():
        for chunk in range(min(chunks, len(shades))):
            label = kind if chunks == 1 else f"{kind}, stage {chunk + 1} of a rank"
            handles.append(Patch(facecolor=shades[chunk], label=label))
    handles.append(Patch(facecolor=_IDLE, label="idle: waits or transfers"))
    if spans:
        names = list(dict.fromkeys(span.name for span in spans))
        handles.append(Patch(facecolor=_SPAN, label=", ".join(names)))
    return handles
