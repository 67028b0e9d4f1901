"""TensorBoard's files, read back with TensorBoard's own EventAccumulator."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from telemetry.plot import plot_losses
from telemetry.report import EvaluationReport, as_metrics
from telemetry.sinks import JsonlSink, Sinks
from telemetry.tensorboard_sink import TensorBoardSink, open_tensorboard
from tests.telemetry.reports import report


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder)).Reload()


def values(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(one.step, one.value) for one in read(folder).Scalars(name)]


def test_the_names_are_those_of_every_sink_over_steps(tmp_path: Path) -> None:
    rows = [report(step=step, loss=1.0 / step) for step in (1, 2, 3)]
    with Sinks([TensorBoardSink(tmp_path)]) as sinks:
        for row in rows:
            sinks.write(row)
        sinks.write(EvaluationReport(step=3, tokens=768, flops=1e9, hours=0.1, loss=2.5))
    assert values(tmp_path, "train/loss") == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert values(tmp_path, "validation/loss") == [(3, 2.5)]
    expected = {*as_metrics(rows[0]), "validation/loss"} - {"step"}
    assert set(read(tmp_path).Tags()["scalars"]) == expected


def test_of_a_step_that_comes_again_the_later_row_counts_in_one_start_and_over_two(tmp_path: Path) -> None:
    """A rollback from 3 to 2, then a start that goes on from step 2."""
    for steps, loss in (((1, 2, 3, 2), 1.0), ((3, 4), 2.0)):
        with Sinks([TensorBoardSink(tmp_path)]) as sinks:
            for number, step in enumerate(steps):
                sinks.write(report(step=step, loss=loss + number / 8))
    assert values(tmp_path, "train/loss") == [(1, 1.0), (2, 1.375), (3, 2.0), (4, 2.125)]


def test_a_loss_that_is_not_finite_is_kept_as_it_is(tmp_path: Path) -> None:
    with Sinks([TensorBoardSink(tmp_path)]) as sinks:
        sinks.write(report(loss=math.nan))
    [(_, value)] = values(tmp_path, "train/loss")
    assert math.isnan(value)


def test_images_are_stored_whole(tmp_path: Path) -> None:
    metrics, image = tmp_path / "metrics.jsonl", tmp_path / "loss.png"
    with Sinks([JsonlSink(metrics), TensorBoardSink(tmp_path / "board")]) as sinks:
        sinks.write(report(step=2))
        plot_losses(metrics, image)
        sinks.write_image("loss_curve", image)
    [kept] = read(tmp_path / "board").Images("loss_curve")
    assert kept.encoded_image_string == image.read_bytes() and kept.step == 2
    assert (kept.width, kept.height) == (960, 540), "8 x 4.5 inches of 120 dots"


def test_a_full_disk_is_told_once_and_the_other_sinks_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    board = TensorBoardSink(tmp_path / "board")
    board.file.close()
    with open("/dev/full", "wb", buffering=0) as full:  # its writes fail as on a full disk
        board.records._writer = full
        with Sinks([board, JsonlSink(tmp_path / "metrics.jsonl")]) as sinks:
            for step in (1, 2, 3):
                sinks.write(report(step=step))
                sinks.write_image("curve", tmp_path / "metrics.jsonl")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    told = capsys.readouterr().err
    assert told.count("warning") == 1 and "No space left on device" in told


@pytest.mark.parametrize("trouble", ["package", "folder"])
def test_where_it_cannot_start_training_goes_on(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "board").write_text("a file where the folder should be")
    if trouble == "package":
        monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    assert open_tensorboard(tmp_path / "board") is None
    assert capsys.readouterr().err.count("warning") == 1
