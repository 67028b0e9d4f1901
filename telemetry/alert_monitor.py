"""The alert rules of a live run, on rank 0: events go to the timeline, the console and the sinks, and may ask to stop.

A start takes up where the last one ended: what was raised is not raised again and can be cleared. Not here: the rules
themselves (`telemetry.alerts`), and stopping the ranks (`engine.alert_stop`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conf.schema import AlertAction, AlertRule
from telemetry.alert_history import ON, count_lines, expectation_of, run_through, still_raised
from telemetry.alert_values import Row
from telemetry.alerts import CLEARED, RAISED, Alerts, Event, silent
from telemetry.sinks import Sinks
from telemetry.timeline import Timeline


class AlertMonitor:
    """Open it after plan.json is written and before the first row; then observe each row.

    stop: the event that asked for the end of the run, None as long as none did.
    """

    def __init__(self, rules: Mapping[str, AlertRule], folder: Path, *, timeline: Timeline) -> None:
        self.timeline = timeline
        self.alerts = Alerts(rules)
        self.stop: Event | None = None
        before = still_raised(folder)
        self.silent = silent(rules, expectation_of(folder))
        had = [count_lines(folder / name) for name in ("metrics.jsonl", "ranks.jsonl")]
        if had[0]:
            run_through(self.alerts, folder)
            self.alerts.set_raised(list(before))
        timeline.add(
            ON, step=self.alerts.last_step, rows=had[0], rank_rows=had[1], rules=list(rules), silent=self.silent
        )
        gone = [event for (name, _), event in before.items() if name not in rules]
        self._tell([_switched_off(event, self.alerts.last_step) for event in gone], None)
        self._tell(self.alerts.begin(expectation_of(folder)), None)
        self.before = [event for key, event in before.items() if key in self.alerts.raised()]

    def start_page(self) -> str:
        """What a reader should know before the first step."""
        count = len(self.alerts.rules)
        if not count:
            return "alerts    none"
        text = f"alerts    {count} rules"
        for kind, why in (
            ("prediction", "no prediction to compare with"), ("observation", "no promoted observation to compare with")
        ):  # fmt: skip
            names = [name for name, reason in self.silent.items() if reason == kind]
            text += f"; silent, as there is {why}: {', '.join(names)}" if names else ""
        for event in self.before:
            text += f"\n          still raised since step {event['step']}: {event['message']}"
        return text

    def observe(self, row: Row, ranks: Sequence[Row] | None, sinks: Sinks) -> None:
        """A row as it went into metrics.jsonl."""
        self._tell(self.alerts.observe(row, ranks, row["step"]), sinks)

    def _tell(self, events: Sequence[Event], sinks: Sinks | None) -> None:
        for event in events:
            details: dict[str, Any] = dict(event)
            self.timeline.add(details.pop("event"), **details)
            action = AlertAction(event["action"])
            if sinks is not None and action is not AlertAction.log:
                verb = "raised" if event["event"] == RAISED else "cleared"
                sinks.alert(f"{event['alert']} {verb} ({event['slice']})", event["message"], event["severity"])
            stops = action in (AlertAction.stop, AlertAction.checkpoint_and_stop)
            if stops and event["event"] == RAISED and self.stop is None:
                self.stop = event


def _switched_off(event: Event, step: int) -> Event:
    """What clears an alert whose rule is no longer there."""
    message = f"cleared {event['alert']} ({event['slice']}): its rule is switched off"
    kept = {key: value for key, value in event.items() if key != "time"}
    return kept | {"event": CLEARED, "step": step, "value": None, "message": message}
