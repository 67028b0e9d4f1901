"""An alert rule that stops a run: all ranks leave after the same step with code 76, and nothing starts them again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.checkpoint_folder import list_checkpoints
from engine.failure import EXIT_STOPPED_BY_ALERT
from telemetry.alert_replay import replay
from tests.engine.launched import LOCAL, ROOT, TINY, events_of, finish, processes_in, steps_of
from tests.engine.test_pretrain import write_corpus
from tests.telemetry.wandb_files import alerts, segments

RECIPE = str(ROOT / "recipes" / "pretrain.py")
SMALL = [*TINY, "data.sources=[{path: ./data/x.jsonl}]"]
SHORT = [*SMALL, "train.train_iters=6", "checkpoint.interval=0"]
RULE = "alerts.high={{metric: train/loss, owner: me, mitigation: x, normal: {{max: {}}}, persistence: {{n: 2, m: 3}}}}"


def run_until_stopped(folder: Path, action: str, *options: str) -> tuple[Path, str]:
    """(folder of the run, output) of two ranks that a loss above 1 stops after step 2."""
    write_corpus(folder)
    command = [str(LOCAL), "-n", "2", *options, RECIPE, *SHORT, RULE.format(1.0), f"alerts.high.action={action}"]
    code, output = finish(command, folder)
    assert code == EXIT_STOPPED_BY_ALERT, output
    run = folder / "runs" / "default" / "r"
    assert steps_of(run) == [1, 2] and "Traceback" not in output
    assert output.count("ALERT high (run): train/loss is") == 2  # when it came, and as the reason at the end
    [raised] = [event for event in events_of(run) if event["event"] == "alert raised"]
    assert (raised["step"], raised["alert"], raised["range"], raised["action"]) == (2, "high", [None, 1.0], action)
    assert json.loads((run / "failed.json").read_text())["error"].startswith("StoppedByAlert('stopped after step 2 by ")
    assert not (run / "complete.json").exists() and not processes_in(folder, RECIPE)
    return run, output


def test_checkpoint_and_stop_saves_the_step_and_is_not_started_again(tmp_path: Path) -> None:
    run, output = run_until_stopped(tmp_path, "checkpoint_and_stop", "-r", "2")
    assert [step for step, _ in list_checkpoints(run / "checkpoints")] == [2] and "restart" not in output
    assert "the newest checkpoint is" in output and "silent, as there is no prediction to compare with: mfu" in output
    [path] = segments(run)
    [(title, level)] = alerts(path)
    assert (title, level) == ("high raised (run)", "WARN")


@pytest.mark.slow
def test_stop_saves_nothing(tmp_path: Path) -> None:
    run, output = run_until_stopped(tmp_path, "stop")
    assert not list_checkpoints(run / "checkpoints") and "there is no checkpoint" in output


@pytest.mark.slow
def test_after_a_stop_the_same_command_goes_on_and_the_alert_is_cleared_once(tmp_path: Path) -> None:
    run, _ = run_until_stopped(tmp_path, "checkpoint_and_stop")
    code, output = finish([str(LOCAL), "-n", "2", RECIPE, *SHORT, RULE.format(100.0)], tmp_path)
    assert code == 0 and "still raised since step 2" in output, output
    assert steps_of(run) == [1, 2, 3, 4, 5, 6]
    found = [(event["event"], event["step"]) for event in events_of(run) if event["event"].startswith("alert ")]
    assert found == [("alert raised", 2), ("alert cleared", 3)]  # the rule in force judges the steps before, too


@pytest.mark.slow
def test_rules_but_the_paces_raise_nothing_over_a_healthy_run_on_a_busy_cpu(tmp_path: Path) -> None:
    """120 steps, with evaluations and checkpoints between: rules that are relative to the recent past judge 95. The
    pace of a machine that others use does drop, and that alert is right then.
    """
    write_corpus(tmp_path)
    command = [str(LOCAL), "-n", "2", RECIPE, *SMALL, "train.train_iters=120", "checkpoint.interval=25"]
    command.append("~alerts.throughput_drop")
    code, output = finish([*command, "train.eval_interval=30", "train.lr=3e-3"], tmp_path, timeout=300)
    run = tmp_path / "runs" / "default" / "r"
    assert code == 0 and replay(run) == [], output
    assert [event for event in events_of(run) if event["event"].startswith("alert ")] == []
