"""What happened to a run, in order, over all its starts: timeline.jsonl, one event a line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from telemetry.redact import redacted
from telemetry.run_folder import utc_now


class Timeline:
    """add(...) on every rank; only where there is a path (rank 0) it is written, and said on the console."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.refused = ""  # lines that a full disk did not take yet
        self.listener: Callable[[dict[str, Any]], None] = lambda row: None  # told of every event

    def add(self, event: str, *, step: int, message: str | None = None, **details: Any) -> None:
        """event: start, resume, restart, weights, evaluation, checkpoint, checkpoint failed, bad step, no token counts,
        rollback, alert raised, alert cleared, rank lost, stopped on request, end.
        """
        if self.path is None:
            return
        row = redacted({"time": utc_now(), "event": event, "step": step, **details})
        if message is not None:
            row["message"] = redacted(message)
            print(f"step {step:>6}  {row['message']}", flush=True)
        line = json.dumps(row, default=str) + "\n"
        try:
            with self.path.open("ab+") as file:
                torn = file.tell() > 0 and _last_byte(file) != b"\n"  # of a start that was killed while it wrote
                file.write(("\n" * torn + self.refused + line).encode())
            self.refused = ""
        except OSError as error:  # a full or lost disk ends no training
            if not self.refused:
                kept = "events are kept until it can"
                print(f"warning: {self.path} cannot be written, {kept}: {error.strerror}", file=sys.stderr, flush=True)
            self.refused += line
        self.listener(row)


def _last_byte(file: IO[bytes]) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)
