"""How long a pipeline's step takes, without its single passes: for a search that asks ten thousand times.

The longest path through the passes of a step has few shapes (warm-up to a stage, steady work on the slowest, the way
out), so its length is a maximum over stages: for 1f1b, eager1f1b and gpipe in O(ranks), whatever the number of
micro-batches. dualpipev and interleaved take the longest path through a graph (`parallel.step_graph`), O(ranks^2).
Results travel as `parallel.timeline` says; tests hold both against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add

from parallel.instructions import check
from parallel.step_graph import graph_of


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch on one (virtual) stage."""

    forward_s: float
    backward_s: float  # recomputation included
    send_s: float = 0.0  # its output to the next stage, and the gradient back: one transfer each


def estimate_step_s(schedule: str, stages: Sequence[StageTimes], *, ranks: int, num_micro_batches: int) -> float:
    """`simulate(...).step_s` of `parallel.timeline`, with the schedule's own way of sending.

    Equal to rounding, but for two: interleaved with wildly unequal stages or slow transfers, and 1f1b with fewer
    micro-batches than ranks and transfers as long as passes, are within 1 %.
    """
    check(schedule, stages=len(stages), ranks=ranks, num_micro_batches=num_micro_batches)
    forward_s = tuple(stage.forward_s for stage in stages)
    backward_s = tuple(stage.backward_s for stage in stages)
    send_s = (*(stage.send_s for stage in stages[:-1]), 0.0)
    if schedule == "dualpipev":
        return _dualpipev(forward_s, backward_s, send_s, ranks, num_micro_batches)
    if schedule == "interleaved":
        return _interleaved(forward_s, backward_s, send_s, ranks, num_micro_batches)
    before_s = [0.0, *send_s[:-1]]
    if schedule == "gpipe":
        around_s = list(map(add, before_s, send_s))
        slowest = sum(max(map(add, around_s, pass_s)) for pass_s in (forward_s, backward_s))
        return sum(forward_s) + sum(backward_s) + 2 * sum(send_s) + (num_micro_batches - 1) * slowest
    if schedule == "eager1f1b":  # a transfer holds the receiver alone: it is part of the pass that needs it
        received = list(map(add, forward_s, before_s)), list(map(add, backward_s, send_s))
        ahead = [2 * (ranks - stage) - 1 for stage in range(ranks)]
        return _one_forward_one_backward(*received, [0.0] * ranks, ahead, num_micro_batches)
    return _one_forward_one_backward(forward_s, backward_s, send_s, list(range(ranks, 0, -1)), num_micro_batches)


def _one_forward_one_backward(
    forward_s: Sequence[float], backward_s: Sequence[float], send_s: Sequence[float], ahead: Sequence[int], count: int
) -> float:
    """The longest path of `count` micro-batches where stage s runs ahead[s] forwards before its first backward.

    A path goes down the forwards of micro-batch 0, may wait out the warm-up behind the slowest stage above a turn,
    comes back up the backwards to a stage, stays there while it works without a pause, and leaves as it came, in
    reverse: down the forwards of the last micro-batch, up through the backwards that are left. Where a stage waits for
    both neighbours, each step up or down costs it two transfers (a gradient one way, an activation the other).
    """
    fill_s, drain_s = [], []  # from the start to the last forward before stage s turns; from there to the end, reversed
    fill = drain = slowest_fill = slowest_drain = before = 0.0
    for f, b, send, warm_up in zip(forward_s, backward_s, send_s, ahead, strict=True):
        waits = min(warm_up, count) - 1
        slowest_fill, slowest_drain = max(slowest_fill, before + f + send), max(slowest_drain, before + b + send)
        fill, drain = fill + f, drain + b
        fill_s.append(fill + waits * slowest_fill)
        drain_s.append(drain + waits * slowest_drain)
        fill, drain, before = fill + send, drain + send, send
    longest = 0.0
    start = end = float("-inf")  # to the end of stage s's first backward; from the start of its last forward
    for stage in range(len(forward_s) - 1, -1, -1):
        f, b, send, warm_up = forward_s[stage], backward_s[stage], send_s[stage], ahead[stage]
        before = send_s[stage - 1] if stage else 0.0
        # With all forwards done before the first gradient comes, the last activation has left before it.
        between = send if warm_up > count else 2 * send
        start = max(start + between, fill_s[stage] + 2 * send) + b
        end = max(end + between, drain_s[stage] + 2 * send) + f
        if warm_up >= count:
            longest = max(longest, start + drain_s[stage] - b, end + fill_s[stage] - f)
        else:
            steady = (count - 1 - warm_up) * (f + b + 2 * send + 2 * before)
            longest = max(longest, start + 2 * before + steady + end)
    return longest


@lru_cache(maxsize=4096)  # plans that differ in what no stage feels (ZeRO, order of axes) ask again
def _dualpipev(
    forward_s: tuple[float, ...], backward_s: tuple[float, ...], send_s: tuple[float, ...], ranks: int, count: int
) -> float:
    """A micro-batch takes a rank both of its stages' passes, and an exchange with the rank on either side."""
    last = 2 * ranks - 1
    exchange_s = [0.0] + [max(send_s[rank], send_s[last - 1 - rank]) for rank in range(ranks - 1)] + [0.0]
    cycle_s = [
        forward_s[rank] + backward_s[rank] + forward_s[last - rank] + backward_s[last - rank]
        + exchange_s[rank] + exchange_s[rank + 1]
        for rank in range(ranks)
    ]  # fmt: skip
    window = min(count, 2 * ranks + 2)
    paths = graph_of("dualpipev", stages=2 * ranks, ranks=ranks, num_micro_batches=window).seconds(
        forward_s, backward_s, send_s
    )
    return paths.whole() if window == count else paths.stretched([(count - window) * cycle for cycle in cycle_s])


@lru_cache(maxsize=4096)
def _interleaved(
    forward_s: tuple[float, ...], backward_s: tuple[float, ...], send_s: tuple[float, ...], ranks: int, count: int
) -> float:
    stages = len(forward_s)
    cycle_s = [sum(forward_s[rank::ranks]) + sum(backward_s[rank::ranks]) for rank in range(ranks)]
    window = min(count, 6 * ranks)
    times = (forward_s, backward_s, send_s)
    paths, shorter = (
        graph_of("interleaved", stages=stages, ranks=ranks, num_micro_batches=size).seconds(*times)
        for size in (window, max(ranks, window - 3 * ranks))
    )
    if window == count:
        return paths.whole()
    # Slow transfers can make a way through several ranks the pace: what the window's last rounds added shows it.
    rounds = (count - window) // ranks
    going_on = paths.whole() + rounds * (paths.whole() - shorter.whole()) / 3
    return max(going_on, paths.stretched([rounds * ranks * cycle for cycle in cycle_s]))
