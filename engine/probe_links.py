"""Collectives over each axis of a plan, timed at several sizes; and copies between a device and its host.

Every line of an axis works at once, as in training, so that lines which share a port are measured sharing it.
Not here: the fit of a link to the times (`parallel.fit_links`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from math import lcm

import torch
import torch.distributed as dist

from conf.schema import ProbeConfig
from engine.device import Device
from engine.timing import seconds_together
from parallel.fit_links import Sample
from parallel.topology import Spread, Topology

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
Lines = tuple[tuple[int, ...], ...]


def lines_to_measure(topology: Topology, hosts: Sequence[str]) -> dict[str, Lines]:
    """Groups of ranks by name: the plan's axes, and where these leave a link out, the ranks of each host and across.

    hosts: of each rank. "host": all ranks of each host; "hosts": the first, second, ... ranks of all hosts, where all
    have as many.
    """
    lines = {axis: topology.lines(axis) for axis in ("tensor", "data", "pipe") if topology.size(axis) > 1}
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank, host in enumerate(hosts):
        by_host[host].append(rank)
    inside = tuple(map(tuple, by_host.values()))
    spreads = [worst_spread(group, hosts) for group in lines.values()]
    if max(map(len, inside)) > 1 and all(spread.nodes > 1 for spread in spreads):
        lines["host"] = inside
    if len(inside) > 1 and len(set(map(len, inside))) == 1 and all(spread.nodes == 1 for spread in spreads):
        lines["hosts"] = tuple(zip(*inside, strict=True))
    return lines


def worst_spread(lines: Lines, hosts: Sequence[str]) -> Spread:
    """Over the most hosts, with the fewest ranks on one."""
    counts = [Counter(hosts[rank] for rank in line) for line in lines]
    spreads = [Spread(nodes=len(count), ranks_per_node=min(count.values())) for count in counts]
    return max(spreads, key=lambda spread: (spread.nodes, -spread.ranks_per_node))


def message_sizes(smallest: int, largest: int) -> list[int]:
    """Bytes from smallest to largest, each four times the one before; ValueError where they are fewer than three."""
    if largest < 16 * smallest:
        raise ValueError(
            f"probe.largest_message={largest} leaves too few sizes above probe.smallest_message={smallest}; "
            f"use at least {16 * smallest}"
        )
    sizes = [smallest]
    while sizes[-1] * 4 <= largest:
        sizes.append(sizes[-1] * 4)
    return sizes


def measure_links(
    lines: dict[str, Lines],
    hosts: Sequence[str],
    *,
    device: Device,
    dtype: torch.dtype,
    sizes: Sequence[int],
    chosen: ProbeConfig,
    progress: Callable[[str], None],
) -> list[Sample]:
    """A sample of each group of lines, operation and size. Called on all ranks alike."""
    samples = []
    for name, of_name in lines.items():
        progress(f"links: {name}, {len(of_name)} x {max(map(len, of_name))} ranks")
        mine, group = _open(of_name)
        for operation in OPERATIONS:
            pairs = tuple(pair for line in of_name for pair in _pairs(line))
            shown = pairs if operation == "send_recv" else of_name
            for size in sizes:
                values = _values(size, dtype, lcm(*map(len, of_name)))
                call = _call(operation, values, mine, group, device=device, dtype=dtype)
                seconds = seconds_together(call, device=device, trials=chosen.trials, trial_s=chosen.trial_s)
                if operation == "send_recv":
                    seconds /= 2  # there and back
                number_of_bytes, ranks = values * dtype.itemsize, max(map(len, shown))
                samples.append(Sample(name, operation, number_of_bytes, ranks, worst_spread(shown, hosts), seconds))
    return samples


def measure_host_link(device: Device, *, sizes: Sequence[int], chosen: ProbeConfig) -> list[Sample]:
    """Copies between device and pinned host memory, both ways, all ranks at once; none where the device is the host."""
    if device.kind == "cpu":
        return []
    samples = []
    for size in sizes:
        there = torch.empty(size, dtype=torch.uint8, device=device.torch_device)
        here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        for way, call in (("to device", partial(there.copy_, here)), ("to host", partial(here.copy_, there))):
            seconds = seconds_together(call, device=device, trials=chosen.trials, trial_s=chosen.trial_s)
            samples.append(Sample(f"host, {way}", "send_recv", size, 2, Spread(1, 1), seconds))
    return samples


def _values(number_of_bytes: int, dtype: torch.dtype, multiple: int) -> int:
    """Values of a message, no fewer than asked for, that divide evenly among the ranks."""
    return -(-number_of_bytes // (dtype.itemsize * multiple)) * multiple


def _open(lines: Lines) -> tuple[tuple[int, ...], dist.ProcessGroup | None]:
    """This rank's line and its group; every rank opens all of them, as torch wants."""
    mine: tuple[tuple[int, ...], dist.ProcessGroup | None] = ((), None)
    for line in lines:
        group = dist.new_group(list(line))
        if dist.get_rank() in line:
            mine = line, group
    return mine


def _pairs(line: tuple[int, ...]) -> list[tuple[int, int]]:
    """Partners half a line apart: where a line lies on two hosts, they are on both."""
    half = len(line) // 2
    return [(line[place], line[place + half]) for place in range(half)]


def _call(
    operation: str,
    values: int,
    line: tuple[int, ...],
    group: dist.ProcessGroup | None,
    *,
    device: Device,
    dtype: torch.dtype,
) -> Callable[[], object]:
    """This rank's part of one call over `values` values; nothing for a rank alone or without a partner."""
    if len(line) < 2:
        return lambda: None
    whole = torch.zeros(values, dtype=dtype, device=device.torch_device)
    if operation == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if operation == "send_recv":
        return partial(_there_and_back, whole, dist.get_rank(), _pairs(line), group)
    part = torch.zeros(values // len(line), dtype=dtype, device=device.torch_device)
    if operation == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    assert operation == "reduce_scatter", operation
    return lambda: dist.reduce_scatter_tensor(part, whole, group=group)


def _there_and_back(
    message: torch.Tensor, rank: int, pairs: Sequence[tuple[int, int]], group: dist.ProcessGroup | None
) -> None:
    for first, second in pairs:
        if rank == first:
            dist.send(message, second, group=group)
            dist.recv(message, second, group=group)
        elif rank == second:
            dist.recv(message, first, group=group)
            dist.send(message, first, group=group)
