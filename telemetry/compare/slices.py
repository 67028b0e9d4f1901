"""The smallest part of a run that trouble is known to be in: stage, rank, axis, corpus part. Of one sign of it."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from telemetry.compare.runs import Row, Run
from telemetry.compare.signs import NEAR, Sign, near

SLOW = 1.2  # times the median of the ranks of its stage


def affected(run: Run, sign: Sign) -> list[str]:
    """In words, the narrowest first; empty where nothing is narrower than the run."""
    events = near(run, sign)
    found = [*_of_events(events), *_slow_ranks(run, sign.step), *_samples(run, sign.step, events)]
    return list(dict.fromkeys(found))


def _of_events(events: list[Row]) -> Iterator[str]:
    """What alerts and lost ranks name."""
    for event in events:
        if event.get("event") == "alert raised" and event.get("slice") not in (None, "run"):
            yield f"{event['slice']} (alert {event.get('alert')}, from step {event['step']:,} on)"
        if event.get("event") == "rank lost" and event.get("rank") is not None:
            yield f"rank {event['rank']} (lost at step {event['step']:,})"


def _slow_ranks(run: Run, step: int) -> Iterator[str]:
    """A rank whose compute stands out of its stage in the first gathered row from the step on."""
    row = next((row for at, row in sorted(run.ranks.items()) if step <= at <= step + NEAR), None)
    gathered = row["ranks"] if row is not None else []
    ranks = [one for one in gathered if isinstance(one, dict) and isinstance(one.get("compute_s"), (int, float))]
    for rank in ranks:
        peers = [one["compute_s"] for one in ranks if one.get("pp") == rank.get("pp")]
        if len(peers) > 1 and rank["compute_s"] > SLOW * median(peers) > 0:
            times = rank["compute_s"] / median(peers)
            yield f"rank {rank.get('rank')} on host {rank.get('host')}: computes {times:.2f} x as long as its stage"


def _samples(run: Run, step: int, events: list[Row]) -> Iterator[str]:
    """The part of the corpus: the samples of the bad step, of the event, or between two steps' counts, the one of them
    that is not there by the batch size."""
    for event in events:
        samples = event.get("samples") if event.get("event") == "bad step" else None
        if isinstance(samples, list) and len(samples) == 2:
            first, last = samples
            yield f"samples {first} to {last - 1} of the corpus order (bad step {event['step']:,})"
            return
    begins, ends = (run.steps.get(at, {}).get("train/samples", 0 if at == 0 else None) for at in (step - 1, step))
    batch = run.start_at(step).config.get("train", {}).get("global_batch_size")
    if batch is not None:
        begins = ends - batch if begins is None and ends is not None else begins
        ends = begins + batch if ends is None and begins is not None else ends
    if begins is not None and ends is not None:
        yield f"samples {begins} to {ends - 1} of the corpus order are those of step {step:,}"
