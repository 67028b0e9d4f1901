"""The smallest part of a run that trouble is known to be in: stage, rank, axis, corpus part."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from telemetry.compare.runs import Run

SLOW = 1.2  # times the median of the ranks of its stage


def affected(run: Run, step: int) -> list[str]:
    """In words, the narrowest first; empty where nothing is narrower than the run."""
    return list(dict.fromkeys([*_of_events(run, step), *_slow_ranks(run, step), *_samples(run, step)]))


def _of_events(run: Run, step: int) -> Iterator[str]:
    """What alerts and lost ranks name at the step or later."""
    for event in run.events:
        if event.get("step", 0) < step:
            continue
        if event.get("event") == "alert raised" and event.get("slice") not in (None, "run"):
            yield f"{event['slice']} (alert {event.get('alert')}, from step {event['step']:,} on)"
        if event.get("event") == "rank lost" and event.get("rank") is not None:
            yield f"rank {event['rank']} (lost at step {event.get('step', 0):,})"


def _slow_ranks(run: Run, step: int) -> Iterator[str]:
    """A rank whose compute stands out of its stage in the first gathered row from the step on."""
    row = next((row for at, row in sorted(run.ranks.items()) if at >= step), None)
    ranks = row["ranks"] if row is not None else []
    for rank in ranks:
        peers = [one["compute_s"] for one in ranks if one.get("pp") == rank.get("pp")]
        if len(peers) > 1 and rank["compute_s"] > SLOW * median(peers) > 0:
            times = rank["compute_s"] / median(peers)
            yield f"rank {rank['rank']} on host {rank.get('host')}: computes {times:.2f} x as long as its stage"


def _samples(run: Run, step: int) -> Iterator[str]:
    """The part of the corpus: the samples of the first bad step, of the event or between two steps' counts."""
    for event in run.events:
        if event.get("event") == "bad step" and event.get("samples"):
            first, last = event["samples"]
            yield f"samples {first} to {last - 1} of the corpus order (bad step {event['step']:,})"
            return
    seen = [run.steps.get(at, {}).get("train/samples") for at in (step - 1, step)]
    if seen[0] is not None and seen[1] is not None:
        yield f"samples {seen[0]} to {seen[1] - 1} of the corpus order were trained in step {step:,}"
