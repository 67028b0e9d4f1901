"""wandb offline runs are read back; wandb's troubles never reach the training (cases G1, G3, G4, G5)."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from conf.load import to_plain
from conf.schema import Config, WandbConfig, WandbMode
from telemetry.report import EvaluationReport
from telemetry.sinks import Sinks
from telemetry.wandb_sink import WandbSink, open_wandb
from tests.telemetry.reports import report
from tests.telemetry.wandb_files import alerts, segments, stored


def opened(folder: Path, settings: WandbConfig, *, run_id: str = "run1") -> WandbSink | None:
    return open_wandb(
        settings, run_id=run_id, folder=folder, experiment="exp", default_name="exp-tp1", config={}
    )  # fmt: skip


def test_an_offline_run_holds_every_step_and_the_whole_config(tmp_path: Path) -> None:
    config = Config()
    config.model.name = "tiny"
    sink = open_wandb(
        WandbConfig(tags=["a"]), run_id="r1", folder=tmp_path, experiment="exp", default_name="exp-tp1",
        config=to_plain(config),
    )  # fmt: skip
    assert sink is not None
    with Sinks([sink]) as sinks:
        for step in (1, 2, 3):
            sinks.write(report(step=step, loss=float(step)))
        sinks.write(EvaluationReport(step=3, tokens=768, flops=1e9, hours=0.1, loss=9.0))
    rows, logged, run = stored(tmp_path)
    train = [row for row in rows if "train/loss" in row]
    assert [(row["step"], row["train/loss"]) for row in train] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert all(row["train/learning_rate"] > 0 and row["train/grad_norm"] > 0 for row in train)
    assert [row["step"] for row in rows if "validation/loss" in row] == [3]
    assert logged["model"]["name"] == "tiny" and logged["parallel"]["schedule"] == "1f1b"
    assert (run.run_id, run.run_group, run.display_name, list(run.tags)) == ("r1", "exp", "exp-tp1", ["a"])


def test_long_names_and_tags_are_cut_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sink = opened(tmp_path, WandbConfig(name="n" * 200, tags=["t" * 100]))
    assert sink is not None
    sink.close(failed=False, summary={})
    _, _, run = stored(tmp_path)
    assert (len(run.display_name), [len(tag) for tag in run.tags]) == (128, [64])
    assert capsys.readouterr().err.count("cut to") == 2


def test_two_runs_in_one_process_are_two_runs(tmp_path: Path) -> None:
    """Case G5: without finish the second init would return the first run."""
    for name in ("a", "b"):
        sink = opened(tmp_path / name, WandbConfig(), run_id=name)
        assert sink is not None
        sink.write(report())
        sink.close(failed=name == "b", summary={})
    assert [stored(tmp_path / name)[2].run_id for name in ("a", "b")] == ["a", "b"]


def test_disabled_makes_no_run(tmp_path: Path) -> None:
    assert opened(tmp_path, WandbConfig(mode=WandbMode.disabled)) is None
    assert not list(tmp_path.iterdir())


def test_without_the_package_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # import raises ImportError
    assert opened(tmp_path, WandbConfig()) is None
    assert capsys.readouterr().err.count("warning") == 1


def test_an_unreachable_service_falls_back_to_offline_within_its_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    start = time.monotonic()
    sink = opened(tmp_path, WandbConfig(mode=WandbMode.online, init_timeout_s=5))
    assert time.monotonic() - start < 60
    assert sink is not None
    sink.write(report())
    sink.close(failed=False, summary={})
    assert len(stored(tmp_path)[0]) == 1
    assert "warning" in capsys.readouterr().err


def test_log_that_raises_at_step_two_leaves_the_other_steps_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = opened(tmp_path, WandbConfig())
    assert sink is not None
    plain_log = sink.run.log

    def log(values: dict[str, Any]) -> None:
        if values["step"] == 2:
            raise RuntimeError("quota")
        plain_log(values)

    monkeypatch.setattr(sink.run, "log", log)
    with Sinks([sink]) as sinks:
        for step in (1, 2, 3):
            sinks.write(report(step=step))
    sink.close(failed=False, summary={})
    assert capsys.readouterr().err.count("warning") == 1


def test_alerts_reach_the_offline_run_as_often_as_they_come(tmp_path: Path) -> None:
    sink = opened(tmp_path, WandbConfig())
    assert sink is not None
    with Sinks([sink]) as sinks:
        for level in ("info", "warning", "error"):
            sinks.alert("a raised (run)", "why", level)
        sinks.alert("n" * 100, "why", "info")
    [path] = segments(tmp_path)
    assert alerts(path) == [*(("a raised (run)", level) for level in ("INFO", "WARN", "ERROR")), ("n" * 63, "INFO")]


def test_an_alert_that_raises_warns_once_and_metrics_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = opened(tmp_path, WandbConfig())
    assert sink is not None

    def alert(**values: Any) -> None:
        raise RuntimeError("quota")

    monkeypatch.setattr(sink.run, "alert", alert)
    with Sinks([sink]) as sinks:
        sinks.alert("a", "b", "info")
        sinks.alert("a", "b", "info")
        sinks.write(report(step=1))
    assert capsys.readouterr().err.count("warning") == 1
    assert [row["step"] for row in stored(tmp_path)[0]] == [1]


def test_a_file_whose_end_was_lost_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """wandb's service tells nobody that a full disk refused it."""
    import wandb

    for name, share in (("whole", 1.0), ("cut", 0.6)):
        sink = opened(tmp_path / name, WandbConfig())
        assert sink is not None
        for step in range(1, 400):  # several blocks
            sink.write(report(step=step))
        end = wandb.teardown

        def cut(share: float = share, folder: Path = tmp_path / name, end: Any = end) -> None:
            end()
            [path] = folder.glob("wandb/offline-run-*/*.wandb")
            path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])

        with monkeypatch.context() as patch:
            patch.setattr(wandb, "teardown", cut)
            sink.close(failed=False, summary={})
        assert capsys.readouterr().err.count("lacks the end") == (name == "cut")
