"""Who computes or sends slower than the others: rates of engine/probe_hosts.py -> a cell for each host. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_low

from launch.preflight_table import Cell, good, wrong

WITHIN = 0.2  # share of the others' median that a rate may lack

Edges = Mapping[tuple[str, str], float]  # (from, to) -> bytes/s


def slow(rate: float, others: Sequence[float]) -> bool:
    """The lower one of two medians: of three, a fast one does not make the others slow."""
    return bool(others) and rate < (1 - WITHIN) * median_low(others)


def matrix(rates: Mapping[str, Sequence[float]], slots: Mapping[str, Sequence[int]]) -> dict[str, Cell]:
    """rates: host -> FLOP/s of each of its ranks, all computing at once."""
    every = [(host, place) for host, of_host in rates.items() for place in range(len(of_host))]
    fine, cells = [], dict[str, Cell]()
    for host, place in every:
        rate = rates[host][place]
        others = [rates[h][p] for h, p in every if (h, p) != (host, place)]
        if not slow(rate, others):
            fine.append(rate)
        elif host not in cells or rate < min(rates[host][:place]):
            text = f"{_flops(rate)} on slot {slots[host][place]}, the others' median is {_flops(median_low(others))}"
            remedy = "see who else computes there (top, nvidia-smi), and its cooling, power and cores a rank; or -e"
            cells[host] = wrong(text, remedy)
    about = good(f"{_flops(min(fine))} to {_flops(max(fine))} a rank" if fine else "")
    return {host: cells.get(host, about) for host in rates}


def links(edges: Edges) -> dict[str, Cell]:
    """A host is as fast as its best transfer each way, so that a slow partner is not held against it.

    A transfer that is slower than both its hosts can do is its link's fault: both ends are told.
    """
    hosts = list(dict.fromkeys(host for pair in edges for host in pair))
    gives = {host: max(rate for (sender, _), rate in edges.items() if sender == host) for host in hosts}
    takes = {host: max(rate for (_, receiver), rate in edges.items() if receiver == host) for host in hosts}
    told: dict[str, str] = {}
    for way, rates in (("sends", gives), ("receives", takes)):
        for host, rate in rates.items():
            others = [other for name, other in rates.items() if name != host]
            if slow(rate, others):
                told.setdefault(
                    host, f"{way} at most {_bytes(rate)}, the others' median is {_bytes(median_low(others))}"
                )
    for (sender, receiver), rate in edges.items():
        if slow(rate, [min(gives[sender], takes[receiver])]):
            text = (
                f"{sender} to {receiver} {_bytes(rate)}, though both do {_bytes(min(gives[sender], takes[receiver]))}"
            )
            for host in (sender, receiver):
                told.setdefault(host, f"{text} with others")
    remedy = "look at its interface, cable and switch port (ethtool, ibstat), and who else sends; or leave it out (-e)"
    fine = [max(gives[host], takes[host]) for host in hosts if host not in told]
    about = good(f"{_bytes(min(fine))} to {_bytes(max(fine))}" if fine else "")
    return {host: wrong(told[host], remedy) if host in told else about for host in hosts}


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"


def _bytes(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s" if rate >= 1e9 else f"{rate / 1e6:.3g} MB/s"
