"""What wandb's page compares runs by, read back with wandb's own reader from offline runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from conf.schema import WandbConfig
from telemetry.plot import plot_losses
from telemetry.report import AXES, EvaluationReport
from telemetry.sinks import JsonlSink, Sinks
from telemetry.wandb_sink import WandbSink, open_wandb
from tests.telemetry.reports import report
from tests.telemetry.wandb_files import stored
from tests.telemetry.wandb_reader import history, inspected, of_kind, state


def opened(folder: Path, **settings: Any) -> WandbSink:
    sink = open_wandb(
        WandbConfig(**settings), run_id="run1", folder=folder, experiment="exp", default_name="exp-tp1",
        config={"parallel": {"tp": 2}}, tags=["tp2_pp1_dp1", "fp32"],
    )  # fmt: skip
    assert sink is not None
    return sink


def test_every_row_has_the_four_axes_and_the_summary_has_best_and_last(tmp_path: Path) -> None:
    with Sinks([opened(tmp_path)]) as sinks:
        sinks.write(EvaluationReport(step=0, tokens=0, flops=0.0, hours=0.0, loss=9.0))
        for step, (loss, rate, mfu) in enumerate([(3.0, 100.0, 0.1), (1.0, 300.0, 0.3), (2.0, 200.0, 0.2)], start=1):
            sinks.write(report(step=step, loss=loss, tokens=256 * step, tokens_per_s=rate, mfu=mfu))
        sinks.write(EvaluationReport(step=3, tokens=768, flops=1e9, hours=0.1, loss=4.0))
        sinks.write(EvaluationReport(step=3, tokens=768, flops=1e9, hours=0.1, loss=5.0))
        sinks.summary |= {"predicted/step_s": 0.5, "measured/step_s": 0.6}
    rows = history(tmp_path)
    assert len(rows) == 6 and all(set(AXES) <= row.keys() for row in rows)
    assert [row["tokens"] for row in rows if "train/loss" in row] == [256, 512, 768]
    found = state(tmp_path)
    assert (found["state"], found["exit_code"]) == ("finished", 0)
    summary = found["summary"]
    assert summary["train/loss"] == {"min": 1.0, "last": 2.0}
    assert summary["validation/loss"] == {"min": 4.0, "last": 5.0}
    assert summary["train/tokens_per_s"] == {"max": 300.0, "last": 200.0}
    assert summary["train/mfu"] == {"max": 0.3, "last": 0.2}
    assert (summary["predicted/step_s"], summary["measured/step_s"]) == (0.5, 0.6)
    assert summary["train/grad_norm"] == 0.5, "of all others the last"


def test_step_is_the_axis_of_every_metric_and_the_others_can_be_chosen(tmp_path: Path) -> None:
    opened(tmp_path).close(failed=False, summary={})
    metrics = of_kind(tmp_path, "metric")
    assert {one["name"] for one in metrics if "step_metric" not in one} == set(AXES)
    assert {one["step_metric"] for one in metrics if "step_metric" in one} == {"step"}
    assert [one["glob_name"] for one in metrics if "glob_name" in one] == ["*"]


def test_group_job_type_and_tags_come_from_the_experiment_and_the_user(tmp_path: Path) -> None:
    opened(tmp_path / "a", tags=["mine", "fp32"]).close(failed=False, summary={})
    opened(tmp_path / "b", job_type="ablation", group="sweep 3").close(failed=False, summary={})
    [first], [second] = (of_kind(tmp_path / name, "run") for name in "ab")
    assert first["tags"] == ["tp2_pp1_dp1", "fp32", "mine"], "each once"
    assert (first["run_group"], second["run_group"]) == ("exp", "sweep 3")
    assert second["job_type"] == "ablation" and first["job_type"] == Path(sys.argv[0]).stem
    assert first["config"]["update"]["parallel"] == {"tp": 2}


def test_images_are_stored_with_the_step_they_were_drawn_at(tmp_path: Path) -> None:
    metrics, image = tmp_path / "metrics.jsonl", tmp_path / "loss.png"
    with Sinks([JsonlSink(metrics), opened(tmp_path)]) as sinks:
        for step in (1, 2):
            sinks.write(report(step=step))
        plot_losses(metrics, image)
        sinks.write_image("loss_curve", image)
    [row] = [row for row in history(tmp_path) if "train/loss" not in row]
    kept = row["loss_curve"] if "loss_curve" in row else state(tmp_path)["summary"]["loss_curve"]
    assert row["step"] == 2
    [run] = tmp_path.glob("wandb/offline-run-*")
    assert (run / "files" / kept["path"]).read_bytes() == image.read_bytes()


def checkpoint(folder: Path) -> Path:
    path = folder / "checkpoints" / "step-00000004"
    (path / "weights").mkdir(parents=True)
    (path / "weights" / "model.safetensors").write_bytes(b"weights" * 100)
    (path / "manifest.json").write_text("{}")
    return path


def test_a_checkpoint_is_an_artifact_by_reference_and_no_byte_of_it_is_copied(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    with Sinks([opened(tmp_path)]) as sinks:
        sinks.write_checkpoint(path, {"step": 4, "bytes": 700, "checksum": "abc123"})
    [artifact] = of_kind(tmp_path, "artifact")
    assert (artifact["type"], artifact["name"]) == ("checkpoint", "run1-checkpoint")
    assert set(artifact["aliases"]) == {"latest", "step-4"}
    assert json.loads(artifact["metadata"]) == {"step": 4, "bytes": 700, "checksum": "abc123"}
    contents = artifact["manifest"]["contents"]
    assert sorted(one["ref"] for one in contents) == sorted(file.as_uri() for file in path.rglob("*") if file.is_file())
    held = [
        file for file in (tmp_path / "wandb").rglob("*") if file.is_file() and b"weights" * 100 in file.read_bytes()
    ]
    assert held == [] and all("local_path" not in one for one in contents)


@pytest.mark.parametrize(("method", "patched"), [("write_image", "log"), ("write_checkpoint", "log_artifact")])
def test_an_image_or_artifact_that_fails_is_told_once_and_the_rows_go_on(
    method: str, patched: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sink, path = opened(tmp_path), checkpoint(tmp_path)
    with Sinks([sink]) as sinks:
        sinks.write(report(step=1))
        with monkeypatch.context() as patch:
            patch.setattr(sink.run, patched, lambda *arguments, **named: 1 / 0)
            for _ in range(2):
                if method == "write_image":
                    sinks.write_image("curve", path / "manifest.json")
                else:
                    sinks.write_checkpoint(path, {"step": 4})
        sinks.write(report(step=2))
    assert [row["step"] for row in stored(tmp_path)[0]] == [1, 2]
    assert capsys.readouterr().err.count("warning: WandbSink cannot") == 1
    assert inspected(tmp_path)[-1]["exit"]["exit_code"] == 0


def test_an_alert_is_told_without_the_secrets_it_quotes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "0a1b2c3d4e" * 4
    monkeypatch.setenv("SOME_API_KEY", key)
    with Sinks([opened(tmp_path)]) as sinks:
        sinks.alert(f"{'x' * 40} {key}", f"while reading https://me:{key}@host", "warning")  # a title is cut to 63
    [told] = [record for record in inspected(tmp_path) if "alert" in record["type"]]
    assert "***" in json.dumps(told) and key[:10] not in json.dumps(told)
