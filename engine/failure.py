"""How a rank dies: with its traceback once for the whole run, with a non-zero code, and without waiting for anyone.

The first rank that fails claims `failed.json` in the run's folder; the others, which then fail in a collective
because a peer is gone, stay quiet on the console. Every rank's own traceback is in its log `rank-N.log`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path

EXIT_FAILED = 1
EXIT_REFUSED = 2  # bad input
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class StopRun(RuntimeError):
    """A run that cannot go on for a reason that its message says in full; a traceback would hide it."""


def report_failure(folder: Path | None, error: BaseException, *, rank: int) -> None:
    """Write the traceback to the rank's log, and to stderr where this rank is the first to fail."""
    text = "".join(traceback.format_exception(error))
    if folder is None:
        print(f"rank {rank} failed:\n{text}", file=sys.stderr, flush=True)
        return
    (folder / f"rank-{rank}.log").write_text(text)
    record = {"rank": rank, "error": repr(error), "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    try:
        with (folder / "failed.json").open("x") as claim:
            claim.write(json.dumps(record) + "\n")
    except FileExistsError:
        return
    message = str(error) if isinstance(error, StopRun) else text.rstrip()
    print(f"rank {rank} failed: {message}", file=sys.stderr, flush=True)


def leave(code: int) -> None:
    """End this process now: a peer's death must not keep it waiting in a communicator's destructor."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def refuse(error: Exception) -> int:
    """Say what is wrong with the input, once a machine and without a traceback; the exit code to leave with."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(error, file=sys.stderr, flush=True)
    return EXIT_REFUSED
