"""The report's curves as PNGs, for where no browser is: one picture of losses, one of what a step took."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from telemetry.compare.curves import AXES, CHARTS, Chart, name_of, points
from telemetry.compare.runs import Run

COLORS = ("#2a6fdb", "#d9541e", "#14866d", "#8546c7", "#b3325f", "#8a6a00", "#0b7fa5", "#5c6470")  # page.css's
PICTURES = {"losses.png": ("loss", "validation", "norm", "rate"),
            "steps.png": ("speed", "utilisation", "memory", "bubble", "imbalance", "exposed")}  # fmt: skip


def write_pictures(
    runs: Sequence[Run], folder: Path, *, axis: str = "step", parts_at: float | None = None
) -> list[Path]:
    """Those that have anything to draw; parts_at: where on the axis the runs part."""
    charts = {chart.key: chart for chart in CHARTS}
    written = []
    for name, keys in PICTURES.items():
        drawn = [(charts[key], metric) for key in keys if (metric := name_of(charts[key], runs)) is not None]
        if drawn:
            _picture(runs, drawn, folder / name, axis=axis, parts_at=parts_at)
            written.append(folder / name)
    return written


def _picture(
    runs: Sequence[Run], drawn: Sequence[tuple[Chart, str]], path: Path, *, axis: str, parts_at: float | None
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(2, len(drawn))
    rows = -(-len(drawn) // columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(6.2 * columns, 3.0 * rows + 0.5), dpi=110, squeeze=False)
    places = list(grid.flat)
    for axes, (chart, metric) in zip(places, drawn, strict=False):
        for color, run in zip(_colors(len(runs)), runs, strict=True):
            _curve(axes, run, chart, metric, axis=axis, color=color)
        if parts_at is not None and chart.key in ("loss", "norm"):
            axes.axvline(parts_at, color="#c62f2f", linestyle="--", linewidth=0.9)
        axes.set_title(f"{chart.title}{f' ({chart.unit})' if chart.unit else ''}", fontsize=10, loc="left")
        axes.set_xlabel(AXES[axis], fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        if chart.logarithmic:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
            axes.tick_params(axis="y", which="minor", labelsize=7)
    for axes in places[len(drawn) :]:
        axes.set_visible(False)
    handles, labels = places[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper left", ncols=min(3, len(runs)), fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.4 / (3.0 * rows + 0.5)))
    figure.savefig(path)
    pyplot.close(figure)


def _colors(count: int) -> list[str]:
    return [COLORS[place % len(COLORS)] for place in range(count)]


def _curve(axes: Any, run: Run, chart: Chart, metric: str, *, axis: str, color: str) -> None:
    found = [one for one in points(run, chart, metric) if one[axis] is not None]
    y = [float("nan") if one["y"] is None else one["y"] for one in found]
    axes.plot(
        [one[axis] for one in found], y, "o-" if len(found) <= 40 else "-", color=color, label=run.name, linewidth=1.2,
        markersize=2.5,
    )  # fmt: skip
