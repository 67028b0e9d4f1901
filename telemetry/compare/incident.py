"""A started record of what went wrong, as markdown, filled from the timelines and metrics of a bad run and, where there
is one, a good run, as far as these reach. What they cannot say is left as a question, never guessed.

"Mitigates" and "cause" are apart on purpose: that a rollback helped does not say what was wrong. A cause is confirmed
only by a replay (recipes/compare.py --bisect) in which swapping it in, alone, brought the difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from telemetry.compare.differences import between, shortened, shown
from telemetry.compare.divergence import LOSS, NAMES, NORM, Divergence, event_line, event_words, events_before
from telemetry.compare.runs import Row, Run, Start
from telemetry.compare.slices import affected

SYMPTOMS = ("bad step", "skipped step", "alert raised", "rank lost", "checkpoint failed")
REMEDIES = {"rollback": "done", "resume": "done", "alert cleared": "by then in its range again"}
OPEN = "not known from the two runs: "


@dataclass(frozen=True)
class Symptom:
    """The first sign: step, what; the event where it is one."""

    step: int
    what: str
    event: Row | None = None


def incident(good: Run | None, bad: Run, found: Divergence | None, *, confirmed: str | None = None) -> str:
    """confirmed: the cause in words, from a bisection."""
    symptoms = sorted(signs(bad, found), key=lambda one: one.step)
    if not symptoms:
        return (
            f"# Incident: {bad.name}\n\nNo sign of trouble: no alert, no bad step, no failure{_and_no_parting(good)}.\n"
        )
    first = symptoms[0]
    sections = {
        "Signs, earliest first": [f"- step {one.step:,}: {one.what}" for one in symptoms[:12]],
        "Earliest known bad": _earliest(bad, first),
        "Last known good": _last_good(good, bad, first, found),
        "Identities on either side": _identities(good, bad, first),
        "Nearest events before it": [f"- `{event_line(one)}`" for one in events_before(bad, first.step)] or ["- none"],
        "Smallest affected slice": _listed(affected(bad, first.step), "stage, rank, axis and corpus part"),
        "Known-good counterexample": _counterexample(good, bad, first, found),
        "What mitigates": _mitigates(bad, first),
        "Cause": [f"- confirmed: {confirmed}" if confirmed else "- not confirmed; `--bisect` runs both again and swaps "
                  "what differs in one at a time"],
        "To do by a person": ["- impact and who was told:", "- owner:", "- what prevents it from coming back:"],
    }  # fmt: skip
    head = f"# Incident: {bad.name}{f' against {good.name}' if good is not None else ''}\n"
    body = [f"## {title}\n" + "\n".join(lines) + "\n" for title, lines in sections.items()]
    return "\n".join([head, *body])


def _and_no_parting(good: Run | None) -> str:
    return f", and no parting from {good.name}" if good is not None else ""


def signs(run: Run, found: Divergence | None) -> list[Symptom]:
    """Everything that says trouble, of one run and of where it left the other."""
    signs = [
        Symptom(event.get("step", 0), event_words(event), event)
        for event in run.events
        if event.get("event") in SYMPTOMS
    ]
    for name in (LOSS, NORM):
        broken = next((s for s, row in run.steps.items() if name in row and not math.isfinite(row[name])), None)
        if broken is not None:
            signs.append(Symptom(broken, f"the {NAMES[name]} is not finite ({run.steps[broken][name]})"))
    if found is not None and found.steps is not None and found.values is not None and found.metric is not None:
        what = f"its {NAMES[found.metric]} leaves the other run's: {found.values[1]:.6g} for {found.values[0]:.6g}"
        signs.append(Symptom(found.steps[1], what))
    if run.ending == "failed":
        signs.append(Symptom(max(run.steps, default=0) + 1, f"the run failed: {run.error or 'no word why'}"))
    return signs


def _earliest(bad: Run, first: Symptom) -> list[str]:
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


def _times(run: Run, first: Symptom) -> tuple[str | None, str | None]:
    """The nearest times that are known on either side of a step."""
    known: list[tuple[int, Any]] = [(event.get("step", 0), event["time"]) for event in run.events if "time" in event]
    known += [(step, row["time"]) for step, row in run.ranks.items() if "time" in row]
    before = [time for step, time in known if step < first.step]
    later = [time for step, time in known if step >= first.step]
    return max(before, default=None), min(later, default=None)


def _last_good(good: Run | None, bad: Run, first: Symptom, found: Divergence | None) -> list[str]:
    steps = [step for step in bad.steps if step < first.step]
    if not steps:
        return [f"- {OPEN}trouble was there from the first step on"]
    last = max(steps)
    lines = [f"- step {last:,} of {bad.name}: loss {bad.steps[last][LOSS]:.6g}"]
    if good is not None and found is not None and found.agreed is not None:
        lines.append(f"- until {found.axis} {found.agreed:,} it agrees with {good.name} within the tolerance")
    return lines


def _identities(good: Run | None, bad: Run, first: Symptom) -> list[str]:
    """Within the bad run where it was started in between; against the good run where there is one."""
    now, before = bad.start_at(first.step), bad.start_at(max(1, first.step - 1))
    lines = []
    if before.number != now.number:
        lines += [f"Start {before.number} of {bad.name} was good, start {now.number} is bad:", *_sides(before, now)]
    if good is not None:
        other = good.start_at(first.step)
        lines += [f"Good: {good.name}, start {other.number}. Bad: {bad.name}, start {now.number}.", *_sides(other, now)]
    if not lines:
        lines = [f"Both sides are start {now.number} of {bad.name}: nothing was changed in between.", *_facts(now)]
    return lines


def _sides(good: Start, bad: Start) -> list[str]:
    rows = ["", "| | good | bad |", "|---|---|---|"]
    names = ("git_commit", "config_fingerprint", "corpus_fingerprint", "tokenizer_fingerprint", "python")
    found = {name: [one.identity.get(name) for one in (good, bad)] for name in names}
    found["plan"] = [(one.identity.get("profile") or {}).get("hash") for one in (good, bad)]
    for name, values in found.items():
        if any(values):
            rows.append(f"| {name} | {_cell(values[0])} | {_cell(values[1])} |")
    different = [one for one in between([good, bad]) if one.kind == "setting" and one.key not in found]
    for one in different:
        cells = [shortened(shown(value)).replace("|", "\\|") for value in one.values]
        rows.append(f"| **{one.key}** ({one.group}) | {cells[0]} | {cells[1]} |")
    return [*rows, ""]


def _cell(value: Any) -> str:
    return shortened(shown(value)).replace("|", "\\|") if value is not None else "not recorded"


def _facts(start: Start) -> list[str]:
    names = ("git_commit", "config_fingerprint", "corpus_fingerprint", "tokenizer_fingerprint", "hosts")
    return [f"- {name}: {_cell(start.identity[name])}" for name in names if name in start.identity]


def _listed(lines: Sequence[str], what: str) -> list[str]:
    return [f"- {line}" for line in lines] or [f"- {OPEN}{what}"]


def _counterexample(good: Run | None, bad: Run, first: Symptom, found: Divergence | None) -> list[str]:
    lines = []
    if good is not None:
        row = good.steps.get(first.step if found is None or found.steps is None else found.steps[0])
        if row is not None and math.isfinite(row.get(LOSS, math.nan)):
            lines.append(f"- {good.name} at step {row['step']:,}: loss {row[LOSS]:.6g}, {_ended(good)}")
    row = bad.steps.get(first.step - 1)
    if row is not None:
        lines.append(f"- {bad.name} one step before: loss {row[LOSS]:.6g}, gradient norm {row.get(NORM, math.nan):.4g}")
    return lines or [f"- {OPEN}name a good run before the bad one"]


def _ended(run: Run) -> str:
    return f"{run.ending} after {max(run.steps):,} steps"


def _mitigates(bad: Run, first: Symptom) -> list[str]:
    """What is advised, and what was done, with whether trouble of the kind came again."""
    advised = dict.fromkeys(
        str(e["mitigation"]) for e in bad.events if e.get("event") == "alert raised" and e.get("mitigation")
    )
    lines = [f"- advised by its alert, not tried as far as the timeline says: {line}" for line in advised]
    order = list(bad.events)
    begins = next((n for n, event in enumerate(order) if event.get("step", 0) >= first.step), len(order))
    for place, event in enumerate(order[begins:], start=begins):
        if event.get("event") in REMEDIES:
            again = sum(one.get("event") in SYMPTOMS for one in order[place + 1 :])
            outcome = f"{again} signs of trouble after it" if again else "no sign of trouble after it"
            lines.append(f"- {REMEDIES[event['event']]}: `{event_line(event)}`: {outcome}")
    return lines or ["- nothing was tried, as far as the timeline says"]
