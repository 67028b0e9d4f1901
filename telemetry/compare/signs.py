"""Signs of trouble in a run: what its timeline tells, numbers that are not finite, where it left another run, its end.

In the order of time. What belongs to one sign is what is near it: a run may have had two troubles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from telemetry.compare.attempts import REWINDS, place_of, reached
from telemetry.compare.divergence import LOSS, NAMES, NORM, Divergence, event_words
from telemetry.compare.runs import Row, Run

SYMPTOMS = ("bad step", "skipped step", "alert raised", "rank lost", "checkpoint failed")
ENDS = ("end", "stopped on request", "stopped by alert")
NEAR = 10  # steps: as often the ranks are gathered, so that an alert of theirs may come as late


@dataclass(frozen=True)
class Sign:
    """step, what; place: how many events of the timeline came before it; the event where it is one; is_stop: that the
    run only ended there, which may have had reasons outside it."""

    step: int
    what: str
    place: int
    event: Row | None = None
    is_stop: bool = False


def signs(run: Run, found: Divergence | None) -> list[Sign]:
    """Of one run and of where it left the other, earliest first."""
    every = [*_told(run), *_broken_off(run), *_not_finite(run), *_parting(run, found), *_end(run)]
    return sorted(every, key=lambda one: (one.place, one.step, one.event is None))


def chosen(every: Sequence[Sign]) -> Sign:
    """The earliest that says more than that the run ended, where there is one."""
    return next((one for one in every if not one.is_stop), every[0])


def _told(run: Run) -> Iterator[Sign]:
    for place, event in enumerate(run.events):
        is_bad_end = event.get("event") == "end" and event.get("outcome") not in (None, "complete")
        if event.get("event") in SYMPTOMS or is_bad_end:
            is_stop = is_bad_end and event.get("outcome") != "failed"
            yield Sign(event["step"], event_words(event), place, event, is_stop)


def _broken_off(run: Run) -> Iterator[Sign]:
    """Starts that ended without a word: the next one trains steps again that were trained before."""
    ended = True
    for place, event in enumerate(run.events):
        if event.get("event") == "start" and not ended:
            last, again = reached(run.events[:place], run.events[place:]), event["step"]
            what = f"a start ended without a word after step {last:,}, and the next went on from step {again:,}"
            yield Sign(last, f"{what}{': steps were trained again' if again < last else ''}", place, is_stop=True)
        ended = event.get("event") in ENDS


def _not_finite(run: Run) -> Iterator[Sign]:
    for name in (LOSS, NORM):
        broken = next((s for s, row in run.steps.items() if name in row and not math.isfinite(row[name])), None)
        if broken is not None:
            what = f"the {NAMES[name]} is not finite ({run.steps[broken][name]})"
            yield Sign(broken, what, place_of(run.events, broken))


def _parting(run: Run, found: Divergence | None) -> Iterator[Sign]:
    if found is not None and found.steps is not None and found.values is not None and found.metric is not None:
        what = f"its {NAMES[found.metric]} leaves the other run's: {found.values[1]:.6g} for {found.values[0]:.6g}"
        yield Sign(found.steps[1], what, place_of(run.events, found.steps[1]))


def _end(run: Run) -> Iterator[Sign]:
    """Where the timeline's last event does not tell it already."""
    last = max(run.steps, default=0)
    if run.events and run.events[-1].get("event") in ENDS:
        return
    if run.ending == "failed":
        yield Sign(last + 1, f"the run failed: {run.error or 'no word why'}", len(run.events))
    elif run.ending in ("interrupted", "terminated"):
        yield Sign(last, f"the run was {run.ending} after step {last:,}", len(run.events), is_stop=True)
    elif run.ending == "not ended":
        yield Sign(last, f"the run ended without a word after step {last:,}", len(run.events), is_stop=True)


def near(run: Run, sign: Sign) -> list[Row]:
    """The events of a sign: itself, and what came after it in its attempt within NEAR steps."""
    found = []
    for event in run.events[sign.place :]:
        if event.get("event") in REWINDS or event["step"] > sign.step + NEAR:
            break
        found += [event] if event["step"] >= sign.step else []
    return found
