"""What happened to a run, in order, over all its starts: timeline.jsonl, one event a line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from telemetry.redact import redacted
from telemetry.run_folder import utc_now


class Timeline:
    """add(...) on every rank; only where there is a path (rank 0) it is written, and said on the console."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def add(self, event: str, *, step: int, message: str | None = None, **details: Any) -> None:
        """event: start, resume, weights, evaluation, checkpoint, checkpoint failed, bad step, rollback, alert raised,
        alert cleared, rank lost, stopped on request, end.
        """
        if self.path is None:
            return
        row = {"time": utc_now(), "event": event, "step": step, **details}
        if message is not None:
            print(f"step {step:>6}  {message}", flush=True)
            row["message"] = message
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(redacted(row), default=str) + "\n")
        except OSError as error:  # a full or lost disk ends no training
            print(f"warning: {self.path} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
