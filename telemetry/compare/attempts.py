"""The attempts that a timeline is made of: each start, resume and rollback begins one, at the step it goes back to.

A timeline is in the order of time, and its steps are not: what came before a step is what stands before it in the
attempt that trained it for good, and all of the attempts before that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
REWINDS = ("start", "resume", "rollback")
BEGUN = ("evaluation", "checkpoint", "bad step", "skipped step", "rollback", "weights")  # only who trains tells these
QUIET = ("evaluation", "weights", "alerts")  # these change nothing


def placed(events: Sequence[Row]) -> list[Row]:
    """Each with a whole number as its step; a start with the step that it went on from, where older versions say 0."""
    found: list[Row] = []
    for event in events:
        step = event.get("step")
        found.append(event if isinstance(step, int) else event | {"step": 0})
    return [
        event | {"step": _began(found, place)} if event.get("event") == "start" else event
        for place, event in enumerate(found)
    ]


def _began(events: Sequence[Row], place: int) -> int:
    """Its resume tells; one that ended before it had resumed went on from nothing: it stands where the last one was."""
    for event in events[place + 1 :]:
        if event.get("event") == "resume":
            return event["step"]
        if event.get("event") in BEGUN:
            return 0
        if event.get("event") == "start":
            break
    return events[place]["step"] or (reached(events[:place], events[place:]) if place else 0)


def reached(before: Sequence[Row], after: Sequence[Row] = ()) -> int:
    """The last step of the last attempt in `before`; the start after it notes how far the rows came."""
    begins = max((place for place, one in enumerate(before) if one.get("event") in REWINDS), default=0)
    steps = [event["step"] for event in before[begins:]]
    steps += [event["step"] for event in after[1:2] if event.get("event") == "alerts"]
    return max(steps, default=0)


def attempt_of(events: Sequence[Row], step: int) -> int:
    """The place of the event that began the attempt in which a step was trained for good."""
    begun = [place for place, one in enumerate(events) if one.get("event") in REWINDS and one["step"] < step]
    return begun[-1] if begun else 0


def place_of(events: Sequence[Row], step: int) -> int:
    """How many events were there when that step was trained for good."""
    begins = attempt_of(events, step)
    return next((place for place, one in enumerate(events) if place > begins and one["step"] >= step), len(events))


def last_start(events: Sequence[Row], place: int) -> int | None:
    """The number of the start in force at a place of the timeline."""
    numbers = [one.get("start") for one in events[: place + 1] if one.get("event") == "start"]
    return (numbers[-1] or len(numbers)) if numbers else None
