"""A replay over a run's folder finds what the live rules found, over kills, rollbacks, torn lines and other plans."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

from conf.load import to_plain
from conf.schema import AlertAction, AlertReference, AlertRule, AlertSlice, NormalRange, Persistence
from telemetry.alert_history import lines
from telemetry.alert_monitor import AlertMonitor
from telemetry.alert_replay import replay, replay_text, rules_of
from telemetry.alerts import CLEARED, RAISED
from telemetry.sinks import Sinks
from telemetry.timeline import Timeline
from tests.telemetry.alert_cases import PREDICTED, ranks, shipped


def rules() -> dict[str, AlertRule]:
    """The shipped ones, seen sooner and raised more often."""
    some = {
        name: dataclasses.replace(
            rule, persistence=Persistence(2, 3), normal=dataclasses.replace(rule.normal, window=6)
        )
        for name, rule in shipped().items()
    }
    low = AlertRule(
        "train/tokens_per_s", "me", "do", slice=AlertSlice.plan, persistence=Persistence(2, 4),
        normal=NormalRange(min=0.9, relative_to=AlertReference.prediction),
    )  # fmt: skip
    return some | {"low": low}


class Recorded:
    """A run's folder, written as a live run writes it."""

    def __init__(self, folder: Path, given: dict[str, AlertRule]) -> None:
        self.folder, self.rules, self.number = folder, given, 0

    def start(self, *, plan: str = "tp1", tokens_per_s: float = 100.0, keep: bool = True) -> AlertMonitor:
        self.number += 1
        config = {"alerts": to_plain(self.rules), "checkpoint": {"interval": 10}}
        about = {"profile": {"name": plan}, "predicted": PREDICTED | {"tokens_per_s": tokens_per_s}}
        (self.folder / "plan.json").write_text(json.dumps(about))
        (self.folder / "config.json").write_text(json.dumps(config))
        (self.folder / "starts").mkdir(exist_ok=True)
        if keep:
            (self.folder / f"starts/{self.number}.json").write_text(json.dumps({"plan": about, "config": config}))
        timeline = Timeline(self.folder / "timeline.jsonl")
        timeline.add("start", step=0, start=self.number)
        self.monitor = AlertMonitor(self.rules, self.folder, timeline=timeline)
        return self.monitor

    def write(self, row: dict[str, Any], gathered: list[dict[str, Any]] | None = None) -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        if gathered is not None:
            with (self.folder / "ranks.jsonl").open("a") as file:
                file.write(json.dumps({"step": row["step"], "ranks": gathered}) + "\n")
        self.monitor.observe(row, gathered, Sinks([]))

    def tear(self) -> None:
        """A start that was killed while it wrote; the next one ends the line, as the sinks do."""
        for name in ("metrics.jsonl", "ranks.jsonl"):
            with (self.folder / name).open("a") as file:
                file.write('{"step": 3, "train/lo\n')

    def events(self) -> list[dict[str, Any]]:
        """Of the timeline, without its times."""
        found = [event for event in lines(self.folder / "timeline.jsonl") if event["event"] in (RAISED, CLEARED)]
        return [{name: value for name, value in event.items() if name != "time"} for event in found]


def a_step(chance: random.Random, step: int) -> tuple[dict[str, Any], list[dict[str, Any]] | None]:
    slow = chance.random() < 0.4
    row: dict[str, Any] = {
        "step": step, "train/loss": chance.choice([1.0, 1.1, 1.2, 5.0, float("nan")]),
        "train/grad_norm": chance.choice([1.0, 2.0, 30.0]), "train/skipped": chance.random() < 0.3,
        "train/tokens_per_s": chance.choice([50.0, 75.0, 100.0, 120.0]), "train/data_share": chance.random() / 4,
        "train/checkpoint_age_steps": chance.randrange(20), "train/mfu": 0.3 if slow else 0.5,
    }  # fmt: skip
    if step % 2:
        return row, None
    row |= {"pipeline/bubble/stage0": chance.random() / 2, "memory/growth_bytes/stage1": 2500 if slow else 2000}
    row["communication/tensor/all_reduce/seconds"] = chance.random()
    return row, ranks(1.0, 2.0 if slow else 1.0, 1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("seed", range(12))
def test_a_replay_finds_the_events_of_the_live_run(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    run = Recorded(tmp_path, rules())
    step = 0
    for _ in range(chance.randint(1, 5)):
        run.start(plan=chance.choice(["tp1", "tp2"]), tokens_per_s=chance.choice([80.0, 110.0]))
        for _ in range(chance.randint(0, 25)):
            step += 1
            run.write(*a_step(chance, step))
            if chance.random() < 0.2:
                run.write({"step": step, "validation/loss": 1.0})
            if chance.random() < 0.1:
                step = max(0, step - chance.randint(1, 5))  # rolled back
        if chance.random() < 0.5:
            run.tear()
        step = max(0, step - chance.randint(0, 6))  # the next start goes on from a checkpoint before
    live = run.events()
    assert [json.dumps(event) for event in replay(tmp_path)] == [json.dumps(event) for event in live]
    if seed == 0:
        assert {RAISED, CLEARED} == {event["event"] for event in live}
    for name, place in {(event["alert"], event["slice"]) for event in live}:
        mine = [event["event"] for event in live if (event["alert"], event["slice"]) == (name, place)]
        assert mine == [RAISED, CLEARED] * (len(mine) // 2) + [RAISED] * (len(mine) % 2)


def high_loss(action: AlertAction = AlertAction.log) -> dict[str, AlertRule]:
    return {
        "high": AlertRule(
            "train/loss", "me", "do", normal=NormalRange(max=1.0), persistence=Persistence(2, 2), action=action
        )
    }


def test_an_alert_raised_before_a_restart_is_not_raised_again_and_can_be_cleared(tmp_path: Path) -> None:
    run = Recorded(tmp_path, high_loss())
    run.start()
    for step in (1, 2, 3):
        run.write({"step": step, "train/loss": 2.0})
    page = run.start().start_page()
    assert "still raised since step 2" in page and "high" in page
    for step in (2, 3):
        run.write({"step": step, "train/loss": 2.0})
    for step in (4, 5):
        run.write({"step": step, "train/loss": 0.5})
    assert [(event["event"], event["step"]) for event in run.events()] == [(RAISED, 2), (CLEARED, 5)]


def test_an_alert_whose_rule_was_switched_off_is_cleared_at_the_next_start(tmp_path: Path) -> None:
    run = Recorded(tmp_path, high_loss())
    run.start()
    for step in (1, 2):
        run.write({"step": step, "train/loss": 2.0})
    run.rules = {}
    assert run.start().start_page() == "alerts    none"
    run.start()
    assert [event["event"] for event in run.events()] == [RAISED, CLEARED]
    assert "switched off" in run.events()[1]["message"]


def test_rows_are_judged_against_the_plan_that_they_were_trained_under(tmp_path: Path) -> None:
    run = Recorded(tmp_path, {"low": rules()["low"]})
    run.start(plan="fast", tokens_per_s=100.0)
    for step in range(1, 4):
        run.write({"step": step, "train/loss": 1.0, "train/tokens_per_s": 80.0})  # below 90
    run.start(plan="slow", tokens_per_s=50.0)
    for step in range(4, 9):
        run.write({"step": step, "train/loss": 1.0, "train/tokens_per_s": 46.0})  # 45 is the bound
    found = [(event["event"], event["step"], event["slice"]) for event in replay(tmp_path)]
    assert found == [(RAISED, 2, "plan fast"), (CLEARED, 3, "plan fast")]


def test_other_rules_can_be_replayed_and_nothing_is_written(tmp_path: Path) -> None:
    run = Recorded(tmp_path, {})
    run.start(keep=False)
    for step in range(1, 5):
        run.write({"step": step, "train/loss": 2.0})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert replay(tmp_path) == [] and "no alert rules" in replay_text(tmp_path)
    assert [event["step"] for event in replay(tmp_path, high_loss(AlertAction.stop))] == [2]
    text = replay_text(tmp_path, high_loss() | {"mfu": shipped()["mfu"], "bubble": shipped()["pipeline_bubble"]})
    assert "step      2  ALERT high (run): train/loss is 2, normal is 1 or less" in text
    assert text.count("silent: the run has no such number") == 2
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_why_a_rule_judged_nothing_is_told_truly(tmp_path: Path) -> None:
    """Four losses of the five that half a window of ten needs; each rank alone in its stage; a metric of no row."""
    common: dict[str, Any] = {"owner": "me", "mitigation": "do"}
    recent = NormalRange(max=2.0, relative_to=AlertReference.recent, window=10)
    peers = NormalRange(max=2.0, relative_to=AlertReference.peers)
    run = Recorded(tmp_path, {
        "recent": AlertRule("train/loss", normal=recent, **common),
        "peers": AlertRule("compute_s", slice=AlertSlice.rank, normal=peers, **common),
        "absent": AlertRule("train/mfu", normal=NormalRange(min=0.1), **common),
    })  # fmt: skip
    run.start()
    for step in range(1, 5):
        run.write({"step": step, "train/loss": 1.0}, ranks(1.0, 1.0))
    notes = {line.split()[0]: line.partition("silent: ")[2] for line in replay_text(tmp_path).splitlines() if line}
    assert notes["recent"] == "4 of the 5 observations that its median needs"
    assert notes["peers"] == "no rank has peers in its stage"
    assert notes["absent"] == "the run has no such number"


def test_the_rules_in_config_json_are_those_of_the_run(tmp_path: Path) -> None:
    Recorded(tmp_path, shipped()).start()
    assert rules_of(tmp_path) == shipped()


def test_a_folder_without_a_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        replay(tmp_path)
    with pytest.raises(ValueError, match=r"is no run's folder with plan\.json"):
        replay(tmp_path, high_loss())


class Told:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.alerts: list[tuple[str, str]] = []

    def alert(self, title: str, text: str, level: str) -> None:
        self.alerts.append((title, level))

    def write(self, report: Any) -> None: ...
    def write_image(self, name: str, path: Path) -> None: ...
    def close(self, *, failed: bool, summary: dict[str, Any]) -> None: ...


@pytest.mark.parametrize("action", AlertAction)
def test_each_action_does_what_the_one_before_it_does_and_more(
    action: AlertAction, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, told = Recorded(tmp_path, high_loss(action)), Told()
    monitor = run.start()
    for step, loss in enumerate((2.0, 2.0, 0.0, 0.0), 1):
        monitor.observe({"step": step, "train/loss": loss}, None, Sinks([told]))
    assert capsys.readouterr().out.count("ALERT high (run)") == 1
    sent = [("high raised (run)", "warning"), ("high cleared (run)", "warning")]
    assert told.alerts == ([] if action is AlertAction.log else sent)
    stops = action in (AlertAction.stop, AlertAction.checkpoint_and_stop)
    assert (monitor.stop is not None) == stops
