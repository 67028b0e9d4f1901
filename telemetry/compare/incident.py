"""A started record of what went wrong, as markdown, filled from the timelines and metrics of a bad run and, where there
is one, a good run, as far as these reach. What they cannot say is left as a question, never guessed.

"Mitigates" and "cause" are apart on purpose: that a rollback helped does not say what was wrong. A cause is confirmed
only by a replay (recipes/compare.py --bisect) in which swapping it in, alone, brought the difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from telemetry.compare.attempts import last_start
from telemetry.compare.differences import between, shown
from telemetry.compare.divergence import LOSS, NORM, Divergence, event_line, events_before, nearest
from telemetry.compare.runs import Row, Run, Start
from telemetry.compare.signs import NEAR, SYMPTOMS, Sign, chosen, near, signs
from telemetry.compare.slices import affected

REMEDIES = {"rollback": "done", "resume": "done", "alert cleared": "by then in its range again"}
MOST_SIGNS = 12
OPEN = "not known from the two runs: "


def incident(good: Run | None, bad: Run, found: Divergence | None, *, confirmed: str | None = None) -> str:
    """confirmed: the cause in words, from a bisection."""
    every = signs(bad, found)
    if not every:
        return (
            f"# Incident: {bad.name}\n\nNo sign of trouble: no alert, no bad step, no failure{_and_no_parting(good)}.\n"
        )
    first = chosen(every)
    before = nearest(bad.events[: first.place]) if first.event is not None else events_before(bad, first.step)
    sections = {
        "Signs, earliest first": _signs(every),
        "Earliest known bad (all below is of it)": _earliest(bad, first),
        "Last known good": _last_good(good, bad, first, found),
        "Identities on either side": _identities(good, bad, first),
        "Nearest events before it": [f"- `{event_line(one)}`" for one in before] or ["- none"],
        "Smallest affected slice": _listed(affected(bad, first), "stage, rank, axis and corpus part"),
        "Known-good counterexample": _counterexample(good, bad, first, found),
        "What mitigates": _mitigates(bad, first, found),
        "Cause": [f"- confirmed: {confirmed}" if confirmed else "- not confirmed; `--bisect` runs both again and swaps "
                  "what differs in one at a time"],
        "To do by a person": ["- impact and who was told:", "- owner:", "- what prevents it from coming back:"],
    }  # fmt: skip
    head = f"# Incident: {bad.name}{f' against {good.name}' if good is not None else ''}\n"
    body = [f"## {title}\n" + "\n".join(lines) + "\n" for title, lines in sections.items()]
    return "\n".join([head, *body])


def _and_no_parting(good: Run | None) -> str:
    return f", and no parting from {good.name}" if good is not None else ""


def _signs(every: Sequence[Sign]) -> list[str]:
    lines = [f"- step {one.step:,}: {one.what}" for one in every[:MOST_SIGNS]]
    more = len(every) - MOST_SIGNS
    return [*lines, f"- and {more} more on its timeline"] if more > 0 else lines


def _earliest(bad: Run, first: Sign) -> list[str]:
    after, before = _times(bad, first)
    lines = [f"- step {first.step:,}: {first.what}"]
    if first.event is not None and first.event.get("time"):
        lines.append(f"- time: {first.event['time']}")
    else:
        lines.append(
            f"- time: after {after or 'the start'}{f', before {before}' if before else ''} (its timeline says)"
        )
    row = bad.steps.get(first.step, {})
    if "tokens" in row:
        lines.append(f"- after {row['tokens']:,} tokens")
    return lines


def _times(run: Run, first: Sign) -> tuple[str | None, str | None]:
    """The nearest times that are known on either side: of the timeline's events, and of steps as they count."""
    before = [event["time"] for event in run.events[: first.place] if "time" in event]
    later = [event["time"] for event in run.events[first.place :] if "time" in event]
    after = max(before, default="")
    for step, row in run.ranks.items():
        if "time" in row and (step < first.step or row["time"] > after):
            (before if step < first.step else later).append(row["time"])
    return max(before, default=None), min(later, default=None)


def _last_good(good: Run | None, bad: Run, first: Sign, found: Divergence | None) -> list[str]:
    steps = [step for step in bad.steps if step < first.step]
    lines = []
    if steps:
        lines.append(f"- step {max(steps):,} of {bad.name}: loss {bad.steps[max(steps)][LOSS]:.6g}")
    kept = [one for one in bad.events[: first.place] if one.get("event") in ("checkpoint", "resume")]
    kept = [one for one in kept if one["step"] < first.step]
    if kept:
        checksum = f", checksum {kept[-1]['checksum']}" if kept[-1].get("checksum") else ""
        path = f": {kept[-1]['checkpoint']}" if kept[-1].get("checkpoint") else ""
        lines.append(f"- the checkpoint of step {kept[-1]['step']:,}{path}{checksum}")
    elif not steps:
        lines.append("- step 0, its initial weights: trouble was there from the first step on")
    if good is not None and found is not None and found.agreed is not None:
        lines.append(f"- until {found.axis} {found.agreed:,} it agrees with {good.name} within the tolerance")
    return lines


def _identities(good: Run | None, bad: Run, first: Sign) -> list[str]:
    """Within the bad run where it was started shortly before; against the good run where there is one."""
    now = _in_force(bad, first)
    earlier = [one for one in bad.starts if one.number < now.number and one.step < first.step]
    lines = []
    if earlier and first.step - now.step <= NEAR:
        before = earlier[-1]
        head = f"Start {before.number} of {bad.name} was good, start {now.number} is bad (from step {now.step:,} on):"
        lines += [head, *_sides((bad, before), (bad, now))]
    if good is not None:
        other = good.start_at(first.step)
        head = f"Good: {good.name}, start {other.number}. Bad: {bad.name}, start {now.number}."
        lines += [head, *_sides((good, other), (bad, now))]
    if not lines:
        lines = [f"Both sides are start {now.number} of {bad.name}: nothing was changed in between.", *_facts(bad, now)]
    return lines


def _in_force(run: Run, sign: Sign) -> Start:
    """By the timeline; an event that was told belongs to the start that told it, whoever trained its step again."""
    if sign.event is None:
        return run.start_at(sign.step)
    number = last_start(run.events, sign.place)
    return next((start for start in run.starts if start.number == number), run.start_at(sign.step))


def _sides(good: tuple[Run, Start], bad: tuple[Run, Start]) -> list[str]:
    """In full: a person looks these up."""
    rows = ["", "| | good | bad |", "|---|---|---|"]
    names = ("git_commit", "config_fingerprint", "corpus_fingerprint", "tokenizer_fingerprint", "python")
    starts = [start for _, start in (good, bad)]
    found: dict[str, list[Any]] = {name: [one.identity.get(name) for one in starts] for name in names}
    found["plan"] = [(one.identity.get("profile") or {}).get("hash") for one in starts]
    found["patch"] = [_patch(*side) for side in (good, bad)]
    for name, values in found.items():
        if any(values):
            rows.append(f"| {name} | {_cell(values[0])} | {_cell(values[1])} |")
    different = [one for one in between(starts) if one.kind == "setting" and one.key not in found]
    for one in different:
        rows.append(f"| **{one.key}** ({one.group}) | {_cell(one.values[0])} | {_cell(one.values[1])} |")
    return [*rows, ""]


def _cell(value: Any) -> str:
    return shown(value).replace("|", "\\|") if value is not None else "not recorded"


def _patch(run: Run, start: Start) -> str | None:
    """Where the uncommitted changes are kept, and how many."""
    if start.patch is None:
        return None
    return f"{run.folder / 'starts' / f'{start.number}.patch'} ({shown(start.patch)})"


def _facts(run: Run, start: Start) -> list[str]:
    names = ("git_commit", "config_fingerprint", "corpus_fingerprint", "tokenizer_fingerprint", "hosts")
    lines = [f"- {name}: {_cell(start.identity[name])}" for name in names if name in start.identity]
    patch = _patch(run, start)
    return [*lines, f"- patch: {patch}"] if patch else lines


def _listed(lines: Sequence[str], what: str) -> list[str]:
    return [f"- {line}" for line in lines] or [f"- {OPEN}{what}"]


def _counterexample(good: Run | None, bad: Run, first: Sign, found: Divergence | None) -> list[str]:
    lines = []
    if good is not None:
        row = good.steps.get(found.steps[0] if found is not None and _is_parting(first, found) else first.step)  # type: ignore[index]
        if row is not None and math.isfinite(row.get(LOSS, math.nan)):
            lines.append(f"- {good.name} at step {row['step']:,}: loss {row[LOSS]:.6g}, {_ended(good)}")
    row = bad.steps.get(first.step - 1)
    if row is not None:
        lines.append(f"- {bad.name} one step before: loss {row[LOSS]:.6g}, gradient norm {row.get(NORM, math.nan):.4g}")
    return lines or [f"- {OPEN}name a good run before the bad one"]


def _is_parting(first: Sign, found: Divergence | None) -> bool:
    """Whether the sign is where the runs part, or near enough to be of it."""
    return found is not None and found.steps is not None and abs(found.steps[1] - first.step) <= NEAR


def _ended(run: Run) -> str:
    return f"{run.ending} after {max(run.steps):,} steps"


def _mitigates(bad: Run, first: Sign, found: Divergence | None) -> list[str]:
    """What is advised, and what was done next, with whether trouble of the kind came again."""
    its = near(bad, first)
    raised = [one for one in its if one.get("event") == "alert raised"]
    advised = dict.fromkeys(str(one["mitigation"]) for one in raised if one.get("mitigation"))
    lines = [f"- advised by its alert, not tried as far as the timeline says: {line}" for line in advised]
    kinds = {_kind(one) for one in its if one.get("event") in SYMPTOMS}
    persists = found is not None and _is_parting(first, found) and found.for_good is not None
    went_back = False
    for place, event in enumerate(bad.events[first.place :], start=first.place):
        name = event.get("event")
        if name in SYMPTOMS and kinds and _kind(event) not in kinds:
            break  # another trouble, with remedies of its own
        cleared = name == "alert cleared" and ("alert raised", event.get("alert")) in kinds
        if not cleared and (went_back or name not in ("rollback", "resume")):
            continue  # later ones are of later troubles
        went_back |= not cleared
        again = sum(_kind(one) in kinds for one in bad.events[place + 1 :] if one.get("event") in SYMPTOMS)
        outcome = f"{again} signs of the same kind after it" if again else "no sign of the same kind after it"
        outcome = "not mitigated: the runs stay apart until the last step they share" if persists else outcome
        lines.append(f"- {REMEDIES[str(name)]}: `{event_line(event)}`: {outcome}")
    return lines or ["- nothing was tried, as far as the timeline says"]


def _kind(event: Row) -> tuple[Any, Any]:
    return event.get("event"), event.get("alert")
