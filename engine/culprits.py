"""Which rank holds a run up, from what each did last; pure functions. Not here: how that is known (watchdog.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Seen:
    """A rank as its peers see it. waits: the call or communication instruction that it waits in; None: it computes."""

    step: int
    what: str
    waits: str | None
    idle_s: float
    beat: int = 0
    silent: bool = False


def culprits(ranks: Mapping[int, Seen]) -> list[int]:
    """Who holds the others up: the silent ranks, else those that wait for nobody, the ones furthest behind of them.

    Where all wait, those behind in steps; none where all wait in one step (calls that do not match, a lost message).
    """
    silent = [rank for rank, seen in ranks.items() if seen.silent]
    if silent:
        return silent
    among = [rank for rank, seen in ranks.items() if seen.waits is None] or list(ranks)
    first = min(ranks[rank].step for rank in among)
    behind = [rank for rank in among if ranks[rank].step == first]
    return [] if len(behind) == len(ranks) > 1 else behind


def verdict(ranks: Mapping[int, Seen], *, timeout_s: float) -> str:
    """The one line on the console, culprits first."""
    stuck = culprits(ranks)
    groups: dict[str, list[int]] = {}
    for rank in [*stuck, *(rank for rank in ranks if rank not in stuck)]:
        groups.setdefault(doing(ranks[rank], stuck=rank in stuck), []).append(rank)
    step = max(seen.step for seen in ranks.values())
    start = f"no progress for {timeout_s:g} s in step {step}: "
    return start + "; ".join(f"{rank_names(members)}: {text}" for text, members in groups.items())


def doing(seen: Seen, *, stuck: bool) -> str:
    """What follows "rank 2: "."""
    at = f" of step {seen.step}" if stuck else ""
    if seen.silent:
        return f"no sign of life since {seen.what}{at} (stopped, or lost)"
    if seen.waits is not None:
        return f"waiting in {seen.waits}{at}" + (f" ({seen.what})" if seen.waits != seen.what else "")
    return f"in {seen.what}{at}" + (f" for {seen.idle_s:.0f} s" if stuck else "")


def rank_names(ranks: Sequence[int]) -> str:
    """rank 2; ranks 0-3, 6"""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    spans = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(spans)
