"""How a rank dies: with its traceback once for the whole run, with a non-zero code, and without waiting for anyone.

The first rank that fails claims `failed.json` in the run's folder; the others, which then fail in a collective
because a peer is gone, stay quiet on the console. Every rank's own traceback is in its log `rank-N.log`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import psutil

from engine import last_state
from telemetry.redact import redacted
from telemetry.run_folder import utc_now
from telemetry.timeline import Timeline

EXIT_FAILED = 1
EXIT_REFUSED = 2  # bad input
EXIT_STOPPED_BY_ALERT = 76  # somebody has to look before it goes on: nothing that restarts runs starts this one again
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
EXIT_REQUEUE = 75  # EX_TEMPFAIL: stopped on request with everything saved; start the same command again


class StopRun(RuntimeError):
    """A run that cannot go on for a reason that its message says in full; a traceback would hide it."""


class StoppedOnRequest(StopRun):
    """Somebody asked the run to stop; its state is saved."""


class StoppedByAlert(StopRun):
    """An alert rule asked for the end of the run."""

    def __init__(self, reason: str, newest: Path | None) -> None:
        held = f"the newest checkpoint is {newest}" if newest is not None else "there is no checkpoint"
        super().__init__(f"{reason}\n{held}; when it is mended, the same command with resume=auto goes on")


def report_failure(folder: Path | None, error: BaseException, *, rank: int, state: str) -> None:
    """Write last state and traceback to the rank's log, the traceback to stderr too where this rank fails first."""
    text = redacted("".join(traceback.format_exception(error)))
    if folder is None:
        print(f"rank {rank} failed:\n{text}", file=sys.stderr, flush=True)
        return
    append_to_log(folder, f"{state}\n{text}", rank=rank)
    if is_lost_peer(error):
        time.sleep(1.0)  # the rank that failed first may still be writing its own report
        message = f"a peer of rank {rank} died without a word (killed, or out of memory), which one the "
        message += f"launcher's lines say; rank {rank}: {state}"
        if claim_failure(folder, rank=rank, error=message, outcome="rank lost"):
            print(f"a rank was lost: {message}", file=sys.stderr, flush=True)
        return
    if claim_failure(folder, rank=rank, error=repr(error)):
        message = str(error) if isinstance(error, StopRun) else text.rstrip()
        print(f"rank {rank} failed: {message}", file=sys.stderr, flush=True)


def append_to_log(folder: Path, text: str, *, rank: int) -> None:
    """A full or lost disk must not hide why a run failed: then it is said on the console only."""
    try:
        with (folder / f"rank-{rank}.log").open("a") as log:
            log.write(f"{utc_now()} rank {rank}: {text.rstrip()}\n")
    except OSError as error:
        print(f"rank {rank}: its log cannot be written ({error.strerror})", file=sys.stderr, flush=True)


def claim_failure(folder: Path, *, rank: int, error: str, outcome: str = "failed") -> bool:
    """Write failed.json, and the end on the timeline, unless another rank did: whether this rank is the first, as far
    as the disk can tell. outcome: failed, rank lost, hung, interrupted or terminated.
    """
    record = redacted({"rank": rank, "error": error, "time": utc_now()})
    try:
        with (folder / "failed.json").open("x") as claim:
            claim.write(json.dumps(record) + "\n")
    except FileExistsError:
        return False
    except OSError:
        return True
    timeline, step = Timeline(folder / "timeline.jsonl"), last_state.current().step
    if outcome == "rank lost":
        timeline.add("rank lost", step=step, error=error, told_by=rank)
    timeline.add("end", step=step, outcome=outcome, rank=rank, error=error)
    return True


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone, by the words of gloo, NCCL and the store."""
    words = (
        "connection closed by peer",
        "connection reset by peer",
        "broken pipe",
        "remote process exited",
        "recvvalue",
    )
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def follow_launcher() -> None:
    """End this rank when DeepSpeed's launcher is gone.

    Its runner leaves the per-node process behind when it alone is interrupted (a kill of its pid, a dropped ssh), and
    that process would train on with all its ranks.
    """
    parent = psutil.Process().parent()
    if parent is None or "deepspeed.launcher.launch" not in parent.cmdline():
        return
    runner = parent.ppid()

    def watch() -> None:
        while parent.is_running() and parent.ppid() == runner:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60.0)  # to finish the step and save
        os._exit(EXIT_TERMINATED)

    threading.Thread(target=watch, name="follow-launcher", daemon=True).start()


def leave(code: int) -> None:
    """End this process now: a peer's death must not keep it waiting in a communicator's destructor."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def refuse(error: Exception) -> int:
    """Say what is wrong with the input, once a machine and without a traceback; the exit code to leave with."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr, flush=True)
    return EXIT_REFUSED
