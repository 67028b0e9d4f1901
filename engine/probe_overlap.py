"""How much of a collective runs beside computation that does not need it: `cluster.rates.overlap`.

An all-reduce and matrix products that take about as long alone are timed apart and together. Where they hide each
other wholly, both take as long as the longer one alone; where they hinder each other, as long as one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from conf.schema import ProbeConfig
from engine.device import Device
from engine.distributed import broadcast
from engine.timing import seconds_together

SQUARE = {"cpu": 512, "cuda": 4096}
MESSAGE_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}


@dataclass(frozen=True)
class Overlap:
    """Seconds of the collective, of the computation, and of both started together."""

    collective_s: float
    compute_s: float
    both_s: float

    @property
    def share(self) -> float:
        """Of the shorter one, what was hidden; 0 where they hinder each other."""
        hidden = self.collective_s + self.compute_s - self.both_s
        return min(1.0, max(0.0, hidden / min(self.collective_s, self.compute_s)))


def measure_overlap(*, device: Device, dtype: torch.dtype, chosen: ProbeConfig) -> Overlap | None:
    """Over all ranks, called on all alike; None for one rank."""
    if dist.get_world_size() == 1:
        return None
    message = torch.zeros(MESSAGE_BYTES[device.kind] // dtype.itemsize, dtype=dtype, device=device.torch_device)
    side = SQUARE[device.kind]
    a, b, out = (torch.randn(side, side, device=device.torch_device).to(dtype) for _ in range(3))
    products = 1

    def collective() -> None:
        dist.all_reduce(message)

    def compute() -> None:
        for _ in range(products):
            torch.mm(a, b, out=out)

    def both() -> None:
        work = dist.all_reduce(message, async_op=True)
        compute()
        work.wait()

    def seconds(call: Callable[[], None]) -> float:
        return seconds_together(call, device=device, trials=chosen.trials, trial_s=chosen.trial_s)

    collective_s = seconds(collective)
    products = broadcast(max(1, round(collective_s / seconds(compute))))
    return Overlap(collective_s, seconds(compute), seconds(both))
