"""What this rank is doing now, noted in one assignment; for the watchdog and for the log of a rank that dies.

A process has one last state, so it is kept here and not handed through trainers and layers. Not here: who reads it
when (engine/watchdog.py).
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any, NamedTuple

from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]  # torch's flight recorder


class State(NamedTuple):
    """waits: whether it is a communication instruction, which ends only when a peer does its part. since: monotonic."""

    step: int
    what: str
    detail: dict[str, Any]
    waits: bool
    since: float


_MAIN = threading.main_thread().ident
_state = State(0, "start", {}, False, time.monotonic())
_beside = 0  # notes of other threads


def now(what: str, *, step: int | None = None, waits: bool = False, **detail: Any) -> None:
    """Note what begins. Without a step it is the one before. Of other threads (a save) only counts that they move."""
    global _state, _beside
    if threading.get_ident() != _MAIN:
        _beside += 1
    else:
        _state = State(_state.step if step is None else step, what, detail, waits, time.monotonic())


def current() -> State:
    return _state


def mark() -> tuple[State, int]:
    """Another one whenever anything was noted since."""
    return _state, _beside


def name(state: State) -> str:
    """ForwardPass(buffer_id=1)"""
    return state.what + (f"({', '.join(f'{k}={v}' for k, v in state.detail.items())})" if state.detail else "")


def describe() -> str:
    """One line for the rank's log."""
    state, collective = _state, collective_in_flight()
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - time.monotonic() + state.since))
    line = f"last state: step {state.step}, {name(state)} since {since} ({time.monotonic() - state.since:.1f} s)"
    return line + (f", in {collective}" if collective else "")


def collective_in_flight() -> str | None:
    """The torch.distributed call that the main thread is in, else the first that the flight recorder knows unfinished.

    Waiting for asynchronous work is no call of torch.distributed; NCCL's calls return before they are done.
    """
    frame = sys._current_frames().get(_MAIN or 0)
    while frame is not None:
        if frame.f_code.co_filename.endswith("distributed_c10d.py"):
            return frame.f_code.co_name
        frame = frame.f_back
    return next((entry["profiling_name"] for entry in _recorded() if _in_flight(entry)), None)


def flight_records(last: int) -> list[str]:
    """The `last` newest entries of torch's flight recorder. With gloo it holds collectives, but no send or receive."""
    return [
        f"{entry['profiling_name']} number {entry['collective_seq_id']} of group {' '.join(entry['process_group'])}: "
        f"{entry['input_dtypes']} {entry['input_sizes']}, "
        + ("in flight" if _in_flight(entry) else "done" if entry["retired"] else entry["state"])
        for entry in _recorded()[-last:]
    ]


def _recorded() -> list[dict[str, Any]]:
    return json.loads(_dump_fr_trace_json(includeCollectives=True, onlyActive=False)).get("entries", [])


def _in_flight(entry: dict[str, Any]) -> bool:
    """gloo's entries stay "scheduled" to the end; NCCL's are so too while the kernel before them runs."""
    return not entry["retired"] and (entry["state"] == "started" or entry["profiling_name"].startswith("gloo:"))
