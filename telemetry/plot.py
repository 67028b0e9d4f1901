"""The loss curve of a run as PNG, read back from its metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

from telemetry import jsonl


def plot_losses(metrics: Path, image: Path) -> None:
    """Draw training and validation loss over steps from `metrics` into `image`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = jsonl.rows(metrics)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    for name, label, style in (("train/loss", "train", "-"), ("validation/loss", "validation", "o-")):
        points = {row["step"]: row[name] for row in rows if name in row}  # of a step that was trained twice the later
        if points:
            axes.plot(*zip(*sorted(points.items()), strict=True), style, label=label, linewidth=1.2, markersize=4)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(image)
    pyplot.close(figure)
