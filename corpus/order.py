"""Orders that are pure functions: a shuffle without a table, and the interleaving of several corpora.

Nothing here holds a random state: `permute` is a keyed bijection (a Feistel network with cycle walking, Luby and
Rackoff 1988; Black and Rogaway 2002), so place i of epoch e is known at once for any i, at any data-parallel size,
after any resume, in constant memory. `Interleave` splits a sequence of draws over sources by weights in exact integer
arithmetic along a Huffman tree. It is not a sampler: each source gets its share in every prefix, not on average.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

ROUNDS = 8  # four make a pseudo-random permutation when the round function is one; the mixer below is weaker
_MASK = (1 << 64) - 1


def order_key(*parts: object) -> int:
    """A 64-bit key from any printable parts, equal on every machine and Python version."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def permute(index: int, *, size: int, key: int) -> int:
    """The image of `index` under the permutation of range(size) that `key` names."""
    if not 0 <= index < size:
        raise ValueError(f"index={index} is outside a permutation of {size}")
    half = max(3, (max(size - 1, 1).bit_length() + 1) // 2)  # at least 64 places: tiny domains mix badly
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for round_number in range(ROUNDS):
            mixed = _mix((key + (round_number + 1) * 0x9E3779B97F4A7C15 + right * 0xD1342543DE82EF95) & _MASK)
            left, right = right, left ^ (mixed >> (64 - half) if half < 64 else mixed)
        index = (left << half) | right
        if index < size:
            return index


@dataclass(frozen=True)
class _Split:
    """A fork: of n draws that arrive here, round(n * left_weight / total) go left."""

    left: _Split | int
    right: _Split | int
    left_weight: int
    total: int

    def left_count(self, draws: int) -> int:
        return (2 * draws * self.left_weight + self.total) // (2 * self.total)


class Interleave:
    """Which source each draw comes from, and how many came from it before.

    After any n draws the count of each source is within 2 of n * weight / sum(weights): each fork rounds (1/2 off),
    and an error shrinks by the branch's share on the way down; along a path of a Huffman tree those shares at least
    halve every two forks, so the sum stays below 1/2 * (1 + 1 + 1/2 + 1/2 + ...) = 2.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        if not weights or any(not math.isfinite(weight) or weight <= 0 for weight in weights):
            raise ValueError(f"data.sources weights {list(weights)} must be finite and above 0; drop unused sources")
        fractions = [Fraction(str(weight)) for weight in weights]
        denominator = math.lcm(*(fraction.denominator for fraction in fractions))
        whole = [int(fraction * denominator) for fraction in fractions]
        heap: list[tuple[int, int, _Split | int]] = [(weight, number, number) for number, weight in enumerate(whole)]
        heapq.heapify(heap)
        made = len(heap)
        while len(heap) > 1:
            small, big = heapq.heappop(heap), heapq.heappop(heap)
            total = small[0] + big[0]
            heapq.heappush(heap, (total, made, _Split(big[2], small[2], big[0], total)))
            made += 1
        self._root = heap[0][2]
        self.num_sources = len(whole)

    def place(self, index: int) -> tuple[int, int]:
        """(source, number of earlier draws from that source) of draw `index`."""
        node = self._root
        while not isinstance(node, int):
            before = node.left_count(index)
            if node.left_count(index + 1) > before:
                node, index = node.left, before
            else:
                node, index = node.right, index - before
        return node, index

    def counts(self, draws: int) -> list[int]:
        """How many of the first `draws` draws come from each source."""
        counts = [0] * self.num_sources
        waiting: list[tuple[_Split | int, int]] = [(self._root, draws)]
        while waiting:
            node, arriving = waiting.pop()
            if isinstance(node, int):
                counts[node] = arriving
            else:
                left = node.left_count(arriving)
                waiting += [(node.left, left), (node.right, arriving - left)]
        return counts
