"""A simulated step as a trace file that ui.perfetto.dev and chrome://tracing open: one track per pipeline rank.

The Trace Event Format (JSON, complete events "X", times in microseconds). Not here: traces of what really ran.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel.timeline import Timeline


@dataclass(frozen=True)
class Span:
    """Something beside the passes of a rank: a collective, the optimizer step."""

    rank: int
    name: str
    start_s: float
    end_s: float


def write_trace(timeline: Timeline, path: Path, *, spans: Sequence[Span] = ()) -> None:
    """Passes under the process "pipeline", spans under "beside the passes": those may overlap with passes."""
    ranks = range(len(timeline.busy_s))
    rows = [_name("process_name", 0, 0, f"pipeline, {timeline.schedule}")]
    rows += [_name("thread_name", 0, rank, f"rank {rank}") for rank in ranks]
    for event in timeline.events:
        args = {"stage": event.stage, "micro_batch": event.micro_batch}
        name = f"{event.kind} {event.micro_batch}"
        rows.append(_complete(name, event.kind, 0, event.rank, event.start_s, event.end_s, args))
    if spans:
        rows.append(_name("process_name", 1, 0, "beside the passes"))
        rows += [_name("thread_name", 1, rank, f"rank {rank}") for rank in ranks]
    for span in spans:
        rows.append(_complete(span.name, "span", 1, span.rank, span.start_s, span.end_s, {}))
    about = {
        "schedule": timeline.schedule,
        "num_micro_batches": timeline.num_micro_batches,
        "step_s": timeline.step_s,
        "bubble": [round(timeline.bubble(rank), 6) for rank in ranks],
    }
    path.write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms", "otherData": about}))


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _complete(
    name: str, category: str, process: int, thread: int, start_s: float, end_s: float, args: dict[str, int]
) -> dict[str, Any]:
    """Both ends are rounded to the viewer's nanosecond, so that what follows on a track never begins too early."""
    start, end = round(start_s * 1e9), round(end_s * 1e9)
    return {
        "ph": "X", "name": name, "cat": category, "pid": process, "tid": thread,
        "ts": start / 1000, "dur": (end - start) / 1000, "args": args,
    }  # fmt: skip
