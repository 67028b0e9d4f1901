"""What every host's devices compute and its links carry, all at the same time and in seconds, to find a slow one.

    python -m engine.probe_hosts '{"hosts": [2, 2], "dtype": "fp32"}'      a rank of 4; the first prints JSON

Matrix rates: every rank multiplies at once. Link rates: hosts in disjoint pairs, first one way and then back, every
device of a host with its like of the other's, and of SAMPLES messages in a row the fastest counts. Rates that differ by
more than DIFFERS are measured again a while later, and the best count, as a disturbance passes and a fault does not.
Not here: laws to plan with (probe.py), and verdicts (launch/).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from conf.schema import DType
from engine.device import Device, this_device
from engine.distributed import gather, start, stop
from engine.session import DTYPES

DIFFERS = 0.2  # share by which the slowest may lack of the fastest before all is measured again
ATTEMPTS, PAUSE_S = 4, 1.0
PARTNERS = 3  # hosts that each is paired with: of three, one may be slow itself
MULTIPLY_S = 1.0
SIDE = {"cpu": 256, "cuda": 8192}  # of a product: on CPUs without bf16 instructions a larger one takes seconds
SAMPLES = 5
FIRST_BYTES = 256 << 10  # tells how much can be sent in TRANSFER_S
LARGEST = {"cpu": 64 << 20, "cuda": 512 << 20}
TRANSFER_S = 0.3  # of all samples together
START_S = 30.0


@dataclass(frozen=True)
class Transfer:
    """From one host to another, by their numbers: bytes/s of all their devices together, timed on the slowest."""

    sender: int
    receiver: int
    rate: float


def pairings(hosts: int, *, most: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs, every two hosts at most once: a round-robin tournament by the circle method."""
    places = list(range(hosts)) + [-1] * (hosts % 2)
    rounds = []
    for _ in range(min(most, len(places) - 1) if hosts > 1 else 0):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([pair for pair in pairs if -1 not in pair])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def differ(rates: Sequence[float]) -> bool:
    return min(rates, default=0.0) < (1 - DIFFERS) * max(rates, default=0.0)


def matrix_rates(device: Device, dtype: torch.dtype) -> list[float]:
    """FLOP/s of every rank; called on all alike."""
    best: list[float] = []
    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE_S * (attempt > 0))
        dist.barrier()
        now = gather(matrix_rate(device, dtype))
        best = now if not best else list(map(max, best, now))
        if not differ(best):
            break
    return best


def matrix_rate(device: Device, dtype: torch.dtype) -> float:
    """FLOP/s over MULTIPLY_S, whoever else took part of it: the median of single products would not see that."""
    side = SIDE[device.kind]
    a, b = (torch.randn(side, side, device=device.torch_device).to(dtype) for _ in range(2))
    a @ b
    began, products = device.now(), 0
    while (now := device.now()) < began + MULTIPLY_S:
        a @ b
        products += 1
    return products * 2 * side**3 / (now - began)


def link_rates(hosts: Sequence[int], device: Device) -> list[Transfer]:
    """hosts: ranks of each. Called on all ranks alike; those without a like on another host stand by."""
    best: dict[tuple[int, int], float] = {}
    wide = min(hosts)
    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE_S * (attempt > 0))
        for pairs in pairings(len(hosts), most=PARTNERS):
            for one_way in (pairs, [pair[::-1] for pair in pairs]):
                dist.barrier()
                received = gather(_transfer(hosts, one_way, wide, device))
                for pair in one_way:
                    rate = wide * min(found[pair] for found in received if pair in found)
                    best[pair] = max(best.get(pair, 0.0), rate)
        if not differ(list(best.values())):
            break
    return [Transfer(*pair, rate) for pair, rate in sorted(best.items())]


def _transfer(
    hosts: Sequence[int], pairs: Sequence[tuple[int, int]], wide: int, device: Device
) -> dict[tuple[int, int], float]:
    """Bytes/s that this rank received; {} where it did not receive."""
    rank = dist.get_rank()
    for pair in pairs:
        sender, receiver = ([sum(hosts[:host]) + local for local in range(wide)] for host in pair)
        if rank in sender:
            _send(receiver[sender.index(rank)], device)
        elif rank in receiver:
            return {pair: _receive(sender[receiver.index(rank)], device)}
    return {}


def _send(to: int, device: Device) -> None:
    size = torch.zeros(1, dtype=torch.int64, device=device.torch_device)
    dist.send(size, to)  # opens the connection
    _serve(FIRST_BYTES, to, device)
    dist.recv(size, to)
    _serve(int(size), to, device)


def _serve(size: int, to: int, device: Device) -> None:
    call, message = _bytes(1, device), _bytes(size, device)
    for _ in range(SAMPLES):
        dist.recv(call, to)
        dist.send(message, to)
    device.synchronize()


def _receive(sender: int, device: Device) -> float:
    dist.recv(torch.zeros(1, dtype=torch.int64, device=device.torch_device), sender)
    first = FIRST_BYTES / _fastest(FIRST_BYTES, sender, device)
    size = int(min(LARGEST[device.kind], max(FIRST_BYTES, first * TRANSFER_S / SAMPLES)))
    dist.send(torch.tensor([size], device=device.torch_device), sender)
    return size / _fastest(size, sender, device)


def _fastest(size: int, sender: int, device: Device) -> float:
    """Seconds of one of SAMPLES messages, each called for, as one that is sent ahead would take no time."""
    call, message, took = _bytes(1, device), _bytes(size, device), []
    for _ in range(SAMPLES):
        began = device.now()
        dist.send(call, sender)
        dist.recv(message, sender)
        took.append(device.now() - began)
    return min(took)


def _bytes(size: int, device: Device) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device.torch_device)


def main(order: dict) -> None:
    device = this_device()
    start(device, timeout_s=START_S)
    matrix = matrix_rates(device, DTYPES[DType[order["dtype"]]])
    links = link_rates(order["hosts"], device)
    stop()
    if os.environ["RANK"] == "0":
        print(json.dumps({"matrix": matrix, "links": [[one.sender, one.receiver, one.rate] for one in links]}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
