"""Layers to pipeline stages by cost, not by count.

The stage that takes longest sets the pace of a pipeline, so the largest stage cost (FLOPs) is made as small as it can
be, by dynamic programming; of the cuts that reach it the most even one is taken, and among those the one with the most
even memory (the first stages hold more micro-batches, and the embedding). Every stage holds at least one block; the
head never leaves the final norm.

Where layers were measured, the cost is nanoseconds in place of FLOPs.

The ordered layer list: 0 embedding, 1..L blocks, L + 1 final norm, L + 2 head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True)
class Load:
    """What one stage costs: `fixed` beside its blocks, `block` for each of them. FLOPs (or nanoseconds), and bytes."""

    fixed_flops: int
    block_flops: int
    fixed_bytes: int = 0
    block_bytes: int = 0

    def flops(self, blocks: int) -> int:
        return self.fixed_flops + blocks * self.block_flops

    def bytes(self, blocks: int) -> int:
        return self.fixed_bytes + blocks * self.block_bytes


@dataclass(frozen=True)
class LayerSeconds:
    """Measured seconds of one micro-batch's forward and backward through a layer; head: with final norm and loss."""

    embedding: float
    block: float
    head: float


def timed(loads: Sequence[Load], seconds: LayerSeconds, *, head_on: int) -> list[Load]:
    """The same loads with nanoseconds for FLOPs; the embedding is on the first rank, the head on rank `head_on`."""
    fixed = [0.0] * len(loads)
    fixed[0] += seconds.embedding
    fixed[head_on] += seconds.head
    return [
        replace(load, fixed_flops=round(1e9 * ends), block_flops=round(1e9 * seconds.block))
        for load, ends in zip(loads, fixed, strict=True)
    ]


@dataclass(frozen=True)
class Comparison:
    """Blocks per pipeline rank of a split and of the uniform one, and the slowest rank's cost (unit of the loads)."""

    counts: tuple[int, ...]
    slowest: int
    uniform: tuple[int, ...]
    slowest_of_uniform: int

    @property
    def gain(self) -> float:
        """The uniform split's slowest rank takes so many times as long."""
        return self.slowest_of_uniform / self.slowest


def uniform(num_blocks: int, stages: int) -> tuple[int, ...]:
    """By count alone: as even as can be, the first stages one more where it is not."""
    each, more = divmod(num_blocks, stages)
    return tuple(each + (stage < more) for stage in range(stages))


def compare_with_uniform(counts: Sequence[int], loads: Sequence[Load]) -> Comparison:
    """A split by cost beside the split by count: as even as it can be, the first ranks one more where it is not."""
    even = uniform(sum(counts), len(counts))

    def slowest(split: Sequence[int]) -> int:
        return max(load.flops(n) for load, n in zip(loads, split, strict=True))

    return Comparison(tuple(counts), slowest(counts), even, slowest(even))


def balance(num_blocks: int, loads: Sequence[Load], *, least: int = 1, memory_limit: int | None = None) -> list[int]:
    """Blocks per stage, in order, at least `least` each.

    memory_limit, in bytes a stage, is kept where any cut keeps it; where none does it is as if it were absent (the
    memory ledger then says so). Raises ValueError where there are too few blocks.
    """
    if num_blocks < least * len(loads):
        raise ValueError(f"{num_blocks} blocks cannot fill {len(loads)} stages of at least {least}; use fewer stages")
    allowed = _within(num_blocks, loads, least, memory_limit)
    if any(not counts for counts in allowed) or sum(counts[-1] for counts in allowed) < num_blocks:
        allowed = _within(num_blocks, loads, least, None)
    slowest = _least_maximum(num_blocks, loads, allowed)
    fast = [[n for n in counts if load.flops(n) <= slowest] for load, counts in zip(loads, allowed, strict=True)]
    return _solve(num_blocks, loads, fast, lambda load, n: (load.flops(n) ** 2, load.bytes(n) ** 2))


def _within(num_blocks: int, loads: Sequence[Load], least: int, memory_limit: int | None) -> list[list[int]]:
    """The counts each stage may take."""
    most = num_blocks - least * (len(loads) - 1)
    return [
        [n for n in range(least, most + 1) if memory_limit is None or load.bytes(n) <= memory_limit] for load in loads
    ]


def _least_maximum(num_blocks: int, loads: Sequence[Load], allowed: Sequence[Sequence[int]]) -> int:
    """The smallest possible cost of the slowest stage: binary search over the costs that occur."""
    costs = sorted({load.flops(n) for load, counts in zip(loads, allowed, strict=True) for n in counts})
    low, high = 0, len(costs) - 1
    while low < high:
        middle = (low + high) // 2
        # Each stage takes any count from its least up to what the bound allows, so the sums in between exist too.
        most = [
            max((n for n in counts if load.flops(n) <= costs[middle]), default=0)
            for load, counts in zip(loads, allowed, strict=True)
        ]
        if 0 not in most and sum(most) >= num_blocks:
            high = middle
        else:
            low = middle + 1
    return costs[low]


def _solve(
    num_blocks: int,
    loads: Sequence[Load],
    allowed: Sequence[Sequence[int]],
    cost: Callable[[Load, int], tuple[int, int]],
) -> list[int]:
    """Counts that sum to num_blocks with the least sum of `cost(load, count)` pairs; there must be some."""
    most_after = [sum(counts[-1] for counts in allowed[stage + 1 :]) for stage in range(len(allowed))]
    least_after = [sum(counts[0] for counts in allowed[stage + 1 :]) for stage in range(len(allowed))]
    best: dict[int, tuple[int, int]] = {0: (0, 0)}  # blocks given out so far -> what that costs
    taken: list[dict[int, int]] = []  # a stage -> blocks given out up to it -> how many it took
    for load, counts, most, least in zip(loads, allowed, most_after, least_after, strict=True):
        step: dict[int, tuple[int, int]] = {}
        took: dict[int, int] = {}
        prices = [(n, *cost(load, n)) for n in counts]
        for done, (flops, held) in best.items():
            for n, more_flops, more_held in prices:
                total = done + n
                if total + least > num_blocks:
                    break
                if total + most < num_blocks:
                    continue
                both = (flops + more_flops, held + more_held)
                if total not in step or both < step[total]:
                    step[total], took[total] = both, n
        best = step
        taken.append(took)
    chosen, left = [], num_blocks
    for took in reversed(taken):
        chosen.append(took[left])
        left -= took[left]
    return chosen[::-1]


def fold(counts: Sequence[int], *, head_in_blocks: float) -> list[int]:
    """Blocks per rank -> per virtual stage of the V schedule: rank r holds stages r and 2 pp - 1 - r.

    `head_in_blocks`: what final norm and head cost, in blocks; rank 0's second stage holds them, and fewer blocks.
    """
    first = [(n + 1) // 2 for n in counts]
    even = round((counts[0] + head_in_blocks) / 2)
    first[0] = min(max(even, 1), counts[0] - 1)
    return first + [n - f for n, f in zip(reversed(counts), reversed(first), strict=True)]


def boundaries(counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Blocks per stage -> (first, last + 1) of the ordered layer list, ends included."""
    cuts = [0]
    for n in counts:
        cuts.append(cuts[-1] + n)
    edges = [0, *(cut + 1 for cut in cuts[1:-1]), cuts[-1] + 3]
    return tuple(pairwise(edges))
