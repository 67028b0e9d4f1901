"""Alert rules evaluated over a run that has ended: a dry replay, which writes nothing and stops nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from conf.schema import AlertReference, AlertRule
from parallel.record import built
from telemetry.alert_history import expectation_of, run_through
from telemetry.alert_text import normal_text
from telemetry.alerts import RAISED, Alerts, Event, silent
from telemetry.tables import table

NO_REFERENCE = {
    "prediction": "nothing is predicted to compare with",
    "observation": "no promoted observation under these conditions",
}


def rules_of(folder: Path) -> dict[str, AlertRule]:
    """The rules of the run's last start."""
    path = folder / "config.json"
    try:
        given = json.loads(path.read_text()).get("alerts", {})
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return {name: built(AlertRule, values) for name, values in given.items()}


def replay(folder: Path, rules: Mapping[str, AlertRule] | None = None) -> list[Event]:
    """What the rules (the run's own where none are given) raise and clear over the folder's steps."""
    return run_through(Alerts(rules_of(folder) if rules is None else rules), folder)


def replay_text(folder: Path, rules: Mapping[str, AlertRule] | None = None) -> str:
    """A table of the rules and what each saw, and every event in its order."""
    alerts = Alerts(rules_of(folder) if rules is None else rules)
    events = run_through(alerts, folder)
    if not alerts.rules:
        return f"{folder}: no alert rules (alerts=none)"
    mute = silent(alerts.rules, expectation_of(folder))
    seen, raised = Counter[str](), Counter(event["alert"] for event in events if event["event"] == RAISED)
    for (name, _), series in alerts.series.items():
        seen[name] += series.observations
    open_now = Counter(name for name, _ in alerts.raised())
    rows = [
        (
            name, rule.metric, rule.slice.value, normal_text(rule), f"{rule.persistence.n} of {rule.persistence.m}",
            seen[name], raised[name], open_now[name], _note(name, rule, alerts, mute, seen[name]),
        )
        for name, rule in alerts.rules.items()
    ]  # fmt: skip
    header = ("alert", "metric", "slice", "normal", "persistence", "judged", "raised", "still", "note")
    lines = [f"alerts over {folder}", table(header, rows), ""]
    lines += [f"step {event['step']:>6}  {event['message']}" for event in events] or ["nothing was raised"]
    return "\n".join(lines)


def _note(name: str, rule: AlertRule, alerts: Alerts, mute: Mapping[str, str], seen: int) -> str:
    """Why nothing was judged. A series is there as soon as its metric is."""
    if seen:
        return ""
    if name in mute:
        return f"silent: {NO_REFERENCE[mute[name]]}"
    series = [one for (other, _), one in alerts.series.items() if other == name]
    if not series:
        return "silent: the run has no such number"
    if rule.normal.relative_to is AlertReference.recent:
        longest, needed = max(len(one.normal) for one in series), -(-rule.normal.window // 2)
        return f"silent: {longest} of the {needed} observations that its median needs"
    if rule.normal.relative_to is AlertReference.peers:
        return "silent: no rank has peers in its stage"
    return "silent: its reference is no number above 0"
