"""Console and metrics.jsonl; a sink that fails is reported once and stops nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from telemetry.plot import plot_losses
from telemetry.report import EvaluationReport
from telemetry.sinks import ConsoleSink, JsonlSink, Sinks, duration, step_line
from tests.telemetry.reports import report


def test_every_report_is_one_line_of_metrics(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Sinks([JsonlSink(path)]) as sinks:
        sinks.write(report(step=1, loss=3.0))
        sinks.write(EvaluationReport(step=1, tokens=256, flops=1e9, hours=0.1, loss=2.5))
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["step"], first["train/loss"], first["tokens"]) == (1, 3.0, 256)
    assert (second["step"], second["validation/loss"]) == (1, 2.5)
    assert "train/mfu" not in first, "an unknown peak gives no MFU rather than a wrong one (case H4)"


class Broken:
    def __init__(self, at_step: int):
        self.at_step = at_step

    def write(self, report: Any) -> None:
        if report.step == self.at_step:
            raise OSError("disk full")

    def write_image(self, name: str, path: Path) -> None:
        raise AssertionError("is off by then")

    def close(self, *, failed: bool, summary: dict[str, Any]) -> None:
        raise AssertionError("is off by then")


def test_a_failing_sink_warns_once_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    with Sinks([Broken(at_step=2), JsonlSink(path)]) as sinks:
        for step in range(1, 5):
            sinks.write(report(step=step))
    assert len(path.read_text().splitlines()) == 4
    assert capsys.readouterr().err.count("warning") == 1


def test_console_prints_the_first_the_last_and_every_nth_step(capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink(interval=10)
    for step in range(1, 26):
        sink.write(report(step=step, train_iters=25))
    steps = [int(line.split()[1].split("/")[0]) for line in capsys.readouterr().out.splitlines()]
    assert steps == [1, 10, 20, 25]


def test_the_progress_line_holds_what_is_watched() -> None:
    line = step_line(report(skipped=True))
    for part in (
        "step      1/3",
        "loss 2.0000",
        "lr 1.00e-03",
        "norm 0.500",
        "512 tokens/s",
        "MFU 50%",
        "ETA 1s",
        "SKIPPED",
    ):
        assert part in line


def test_durations_read_well() -> None:
    assert [duration(s) for s in (0.4, 59, 61, 3600, 7260)] == ["0s", "59s", "1m01s", "1h00m", "2h01m"]


def test_the_curve_is_drawn_from_metrics(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Sinks([JsonlSink(path)]) as sinks:
        for step in range(1, 4):
            sinks.write(report(step=step))
        sinks.write(EvaluationReport(step=3, tokens=1, flops=1e9, hours=0.1, loss=2.0))
    plot_losses(path, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_rows_that_a_full_disk_refuses_are_kept_until_it_takes_them(tmp_path, capfd, monkeypatch):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    plain, full = os.write, [True]

    def write(file, data):
        if full[0]:
            raise OSError(28, "No space left on device")
        return plain(file, data[:40])

    monkeypatch.setattr("telemetry.sinks.os.write", write)
    sink.write(EvaluationReport(step=1, tokens=1, flops=1e9, hours=0.1, loss=1.0))
    sink.write(EvaluationReport(step=2, tokens=2, flops=1e9, hours=0.1, loss=2.0))
    assert capfd.readouterr().err.count("cannot be written, rows are kept until it can") == 1
    full[0] = False
    sink.write(EvaluationReport(step=3, tokens=3, flops=1e9, hours=0.1, loss=3.0))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
