"""Which conversations share a sample: whole ones, never cut, in as few samples as best fit finds.

Best-fit decreasing (Johnson 1973; for sequences arXiv:2404.10830): the longest first, each into the fullest sample that
still has room. Samples come in an order that says nothing of their lengths, so that the first few of a split are a fair
share of it. A pure function of the lengths.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from corpus.order import order_key, permute


def packed(lengths: Sequence[int], *, size: int) -> list[list[int]]:
    """Samples as lists of places in `lengths`, each list's lengths adding up to `size` at most."""
    samples: list[list[int]] = []
    open_by_room: dict[int, list[int]] = {}  # room -> samples with that much of it
    rooms: list[int] = []  # its keys, sorted
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    for place in order.tolist():
        length = int(lengths[place])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            sample, room = len(samples), size
            samples.append([])
        else:
            room = rooms[at]
            sample = open_by_room[room].pop()
            if not open_by_room[room]:
                del open_by_room[room], rooms[at]
        samples[sample].append(place)
        room -= length
        if room:
            if room not in open_by_room:
                insort(rooms, room)
            open_by_room.setdefault(room, []).append(sample)
    return mixed(samples)


def mixed(samples: list[list[int]]) -> list[list[int]]:
    """The samples in an order of their own."""
    key = order_key("packing", len(samples))
    return [samples[permute(n, size=len(samples), key=key)] for n in range(len(samples))]
