"""The report's curves as PNGs, for where no browser is: one picture of losses, one of what a step took."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from telemetry.compare.curves import AXES, CHARTS, Chart, name_of, points
from telemetry.compare.runs import Run

COLORS = ("#2a6fdb", "#d9541e", "#14866d", "#8546c7", "#b3325f", "#8a6a00", "#0b7fa5", "#5c6470")  # page.css's
DASHES = ("-", "--", ":", "-.")  # page.js's, for more runs than colors
LEGEND_COLUMNS = 2  # a column of charts
LONGEST = 28  # characters of a name in a legend
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
    legend_rows = -(-len(runs) // (LEGEND_COLUMNS * columns))
    above = 0.25 + 0.21 * legend_rows
    height = 3.0 * rows + above
    figure, grid = pyplot.subplots(rows, columns, figsize=(6.2 * columns, height), dpi=110, squeeze=False)
    places = list(grid.flat)
    for axes, (chart, metric) in zip(places, drawn, strict=False):
        for place, run in enumerate(runs):
            _curve(axes, run, chart, metric, axis=axis, place=place)
        if parts_at is not None and chart.key in ("loss", "norm"):
            axes.axvline(parts_at, color="#c62f2f", linestyle="--", linewidth=0.9)
        axes.set_title(f"{chart.title}{f' ({chart.unit})' if chart.unit else ''}", fontsize=10, loc="left")
        axes.set_xlabel(AXES[axis], fontsize=8)
        axes.tick_params(labelsize=8)
        if axis == "step":
            axes.xaxis.set_major_locator(pyplot.MaxNLocator(integer=True))
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
    ncols = min(LEGEND_COLUMNS * columns, len(runs))
    figure.legend(handles, labels, loc="upper left", ncols=ncols, fontsize=8.5, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - above / height))
    figure.savefig(path)
    pyplot.close(figure)


def _curve(axes: Any, run: Run, chart: Chart, metric: str, *, axis: str, place: int) -> None:
    found = [one for one in points(run, chart, metric) if one[axis] is not None]
    y = [float("nan") if one["y"] is None else one["y"] for one in found]
    name = run.name if len(run.name) <= LONGEST else f"{run.name[: LONGEST - 1]}…"
    axes.plot(
        [one[axis] for one in found], y, marker="o" if len(found) <= 40 else "", color=COLORS[place % len(COLORS)],
        linestyle=DASHES[place // len(COLORS) % len(DASHES)], label=name, linewidth=1.2, markersize=2.5,
    )  # fmt: skip
