"""Latency and bandwidth of a link from measured times of collectives, under the formulas that plans are made with.

Once ring or tree is chosen (`parallel.links.ways`), a time is linear in latency and 1/bandwidth; the choice hangs on
the link, so fit and choice are repeated until they agree. Pure Python. Not here: measuring (`engine.probe_links`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel.fitting import fit_terms
from parallel.links import Link, ways
from parallel.topology import Spread

ROUNDS = 50  # choices of ring or tree settle in two or three


@dataclass(frozen=True)
class Sample:
    """One measured call. bytes: of the whole tensor, as in `parallel.communication.Collective`.

    `spread`: the nodes that the group lies on; where they are several, all its ranks on a node share the work of
    sending, and `Link.bandwidth` is the share of one.
    """

    axis: str
    operation: str
    bytes: int
    group_size: int
    spread: Spread
    seconds: float


def predicted_s(sample: Sample, link: Link) -> float:
    """What a plan takes this call to cost, `link` being one device's share."""
    return sum(
        term * unit for term, unit in zip(_terms(sample, link), (link.latency_s, 1 / link.bandwidth), strict=True)
    )


def fit_link(samples: Sequence[Sample], *, name: str) -> Link:
    """The link whose predicted times have the least relative errors. ValueError where times do not grow with bytes."""
    seconds = [sample.seconds for sample in samples]
    link = Link(name, max(sample.bytes / sample.seconds for sample in samples), min(seconds) / 2)
    for _ in range(ROUNDS):
        rows = [_terms(sample, link) for sample in samples]
        latency_s, seconds_per_byte = fit_terms(rows, seconds)
        if seconds_per_byte == 0:
            raise ValueError(
                f"times of collectives up to {max(one.bytes for one in samples)} bytes do not grow with their bytes; "
                "raise probe.largest_message"
            )
        link = Link(name, 1 / seconds_per_byte, latency_s)
        if rows == [_terms(sample, link) for sample in samples]:
            break
    return link


def _terms(sample: Sample, link: Link) -> tuple[float, float]:
    """Messages, and bytes that one device sends, by the algorithm that is the faster one on `link`."""
    ports = sample.spread.ranks_per_node if sample.spread.nodes > 1 else 1
    candidates = [(m, share * sample.bytes / ports) for m, share in ways(sample.operation, sample.group_size)]
    return min(candidates, key=lambda terms: terms[0] * link.latency_s + terms[1] / link.bandwidth)
