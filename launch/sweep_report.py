"""How a sweep's jobs ended: one line each while it goes on, a table at its end, and the code that its caller gets.

Not here: what the runs reached side by side, which recipes/compare.py prints of the same folders.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.remote import ROOT
from launch.sweep_pool import Ended
from telemetry import jsonl

STOPPED = 75  # as launch/local.sh: on request, with a checkpoint saved
WORDS = {
    0: "finished", 2: "refused", STOPPED: "saved and stopped", 76: "stopped by an alert", 130: "interrupted",
    143: "ended by SIGTERM", None: "not started",
}  # fmt: skip
LONGEST = 160  # characters of an error's line


def comparison(folders: Sequence[Path]) -> list[str]:
    """The command that compares the runs of one sweep."""
    out = folders[0].parent / "comparison" / "report.html"
    return [sys.executable, str(ROOT / "recipes" / "compare.py"), *map(str, folders), "--out", str(out)]


def outcome(code: int | None) -> str:
    return WORDS.get(code, f"failed with code {code}")


def line_of(ended: Ended) -> str:
    """Of a job that ended."""
    head = f"{ended.task.job.run_id} {outcome(ended.code)} after {ended.seconds:.0f} s"
    return head if ended.code in (0, STOPPED) else f"{head}: {last_words(ended.task.log)}; {ended.task.log}"


def last_words(log: Path) -> str:
    """The last line that names an error, or the last one."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line.lower()]
    return (errors or lines or ["it said nothing"])[-1][:LONGEST]


def table(codes: Sequence[tuple[str, int | None, float | None, Sequence[str]]]) -> str:
    """A line a job: run, how it ended, seconds, the overrides that it does not share with all."""
    rows = [("run", "outcome", "time", "overrides")]
    for run, code, seconds, swept in codes:
        rows.append((run, outcome(code), "" if seconds is None else f"{seconds:.0f} s", " ".join(swept)))
    widths = [max(len(row[place]) for row in rows) for place in range(3)]
    return "\n".join("  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in rows)


def last_value(folder: Path, metric: str) -> float | None:
    """Of a metric in a run's metrics.jsonl; None where it has none that is a number."""
    found = [row[metric] for row in jsonl.rows(folder / "metrics.jsonl") if isinstance(row.get(metric), (int, float))]
    return float(found[-1]) if found and math.isfinite(found[-1]) else None
