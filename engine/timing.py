"""How long a call takes on ranks that make it together, as in training. Not here: what is timed."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch.distributed as dist

from engine.device import Device
from engine.distributed import broadcast, gather

MOST_CALLS = 200  # of one trial


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
