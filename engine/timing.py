"""Marks on a device's clock, and how long a call takes on ranks that make it together. Not here: what is timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from engine.device import Device
from engine.distributed import broadcast, gather

MOST_CALLS = 200  # of one trial


def time_mark(device: torch.device) -> Any:
    """Now: an event in the queue of a GPU, a clock's reading on a CPU, where a call ends before the next begins."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Of two marks; those of a GPU only after it was waited for."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def seconds_together(call: Callable[[], object], *, device: Device, trials: int, trial_s: float) -> float:
    """Seconds of one call on the slowest rank: the median of `trials`, each of calls for about `trial_s` seconds.

    Every rank of the world calls it alike, with its own part of the work. Each trial starts together; its calls follow
    each other without a pause, so that what ranks start apart is spread over them.
    """
    call()  # first use: kernels are chosen, connections opened
    start = device.now()
    call()
    calls = broadcast(max(1, min(MOST_CALLS, round(trial_s / max(device.now() - start, 1e-9)))))
    seconds = []
    for _ in range(trials):
        dist.barrier()
        start = device.now()
        for _ in range(calls):
            call()
        seconds.append((device.now() - start) / calls)
    return median(max(trial) for trial in zip(*gather(seconds), strict=True))
