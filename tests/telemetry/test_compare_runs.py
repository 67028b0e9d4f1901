"""Reading runs: what counts of rows that come twice, how runs end, wandb's files, and folders that are no run."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from conf.schema import WandbConfig
from recipes.compare import main
from telemetry.compare.differences import changes_text
from telemetry.compare.runs import RunError, load_run, load_runs
from telemetry.report import EvaluationReport
from telemetry.sinks import Sinks
from telemetry.wandb_sink import open_wandb
from tests.telemetry.reports import report
from tests.telemetry.run_folders import event, plain_config, step_row, write_lines, write_run


def test_of_a_step_trained_twice_the_later_row_counts_and_what_came_behind_it_is_gone(tmp_path: Path) -> None:
    """A rollback from step 6 to 3: steps 5 and 6 of the first attempt are on nobody's way until they are trained."""
    rows = [step_row(step) for step in range(1, 7)]
    rows += [{"step": 6, "tokens": 1, "validation/loss": 9.0}, step_row(4, train__loss=1.5)]
    run = load_run(write_run(tmp_path / "a", rows=rows))
    assert list(run.steps) == [1, 2, 3, 4]
    assert run.steps[4]["train/loss"] == 1.5
    assert run.evaluations == {}


def test_a_torn_last_line_is_noted_and_the_rest_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", ending=None)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "train/lo')
    run = load_run(folder)
    assert max(run.steps) == 40
    assert run.notes == ["metrics.jsonl:41 is torn and left out"]


@pytest.mark.parametrize("rows", [[], [{"step": 0, "validation/loss": 8.0}]])
def test_a_run_without_a_step_is_read_and_says_so(rows: list, tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "a", rows=rows, ending="failed"))
    assert (run.ending, run.error, run.steps) == ("failed", "boom", {})
    assert "no step was recorded" in run.notes


def test_a_run_in_progress_is_running_and_a_killed_one_has_not_ended(tmp_path: Path) -> None:
    for name, process in (("lives", os.getpid()), ("killed", 2**22 + 1)):
        folder = write_run(tmp_path / name, ending=None)
        (folder / "run.lock").write_text(f"process {process} on {socket.gethostname()} since 2026-01-01T00:00:00Z")
    assert [load_run(tmp_path / name).ending for name in ("lives", "killed")] == ["running", "not ended"]


@pytest.mark.parametrize(
    ("events", "ending"),
    [
        ([event(7, "stopped on request")], "stopped on request"),
        ([event(7, "end", outcome="interrupted")], "interrupted"),
    ],
)
def test_without_a_marker_the_timeline_tells_the_ending(events: list, ending: str, tmp_path: Path) -> None:
    assert load_run(write_run(tmp_path / "a", events=events, ending=None)).ending == ending


def test_each_start_is_known_with_the_steps_it_trained(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", events=[event(0, "start", start=2), event(10, "resume")])
    second = json.loads((folder / "starts" / "1.json").read_text())
    second["config"]["train"]["lr"] = 0.5
    (folder / "starts" / "2.json").write_text(json.dumps(second))
    (folder / "starts" / "2.patch").write_text("diff")
    run = load_run(folder)
    assert [(run.start_at(step).number, run.start_at(step).patch) for step in (10, 11)] == [(1, None), (2, "diff")]
    assert run.last.config["train"]["lr"] == 0.5
    assert changes_text(run) == ["a: start 2 changed, from step 10 on: train.lr 0.0003 -> 0.5, patch none -> diff"]


def test_a_folder_of_an_older_version_without_starts_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    for path in (folder / "starts").iterdir():
        path.unlink()
    run = load_run(folder)
    assert run.last.identity["corpus_fingerprint"] == "corpus-1"
    assert run.last.plan["world_size"] == 2


def test_hours_are_summed_up_where_rows_lack_them(tmp_path: Path) -> None:
    rows = [step_row(step) for step in (1, 2, 3)]
    for row in rows:
        del row["hours"]
    run = load_run(write_run(tmp_path / "a", rows=rows))
    assert [row["hours"] for row in run.steps.values()] == pytest.approx([0.5 / 3600, 1.0 / 3600, 1.5 / 3600])


def test_paths_that_are_no_run_are_refused_in_one_line(tmp_path: Path) -> None:
    write_run(tmp_path / "default" / "a")
    (tmp_path / "file").write_text("")
    (tmp_path / "x.wandb").write_text("not wandb's")
    for name, words in (
        ("nowhere", "does not exist; name the folder of a run"),
        ("file", "is a file; name the folder of a run"),
        ("default", f"did you mean {tmp_path / 'default' / 'a'}"),
        ("x.wandb", "is not a wandb file"),
    ):
        with pytest.raises(ValueError, match=words.replace("(", r"\(")) as refused:
            load_run(tmp_path / name)
        assert "\n" not in str(refused.value)
    assert issubclass(RunError, ValueError)


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / "x" / "a"), write_run(tmp_path / "y" / "a"), write_run(tmp_path / "b")]
    assert [run.name for run in load_runs(paths)] == ["a (x/a)", "a (y/a)", "b"]
    assert [run.name for run in load_runs([paths[0], paths[0]])] == ["a (x/a) (1)", "a (x/a) (2)"]


def test_wandbs_offline_files_hold_the_same_curve_and_config(tmp_path: Path) -> None:
    """Two starts of one run: its folders are read together, in their order, whichever is named."""
    for losses in ((3.0, 2.0, float("nan")), (1.5, 1.0)):
        first = 1 if len(losses) == 3 else 3
        sink = open_wandb(
            WandbConfig(), run_id="r1", folder=tmp_path, experiment="exp", default_name="n", config=plain_config()
        )
        assert sink is not None
        with Sinks([sink]) as sinks:
            for step, loss in enumerate(losses, start=first):
                sinks.write(report(step=step, loss=loss, tokens=256 * step))
            sinks.write(EvaluationReport(step=step, tokens=256 * step, flops=0, hours=0.0, loss=9.0))
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    run = load_run(folders[-1])
    assert (run.name, run.ending) == ("r1", "complete")
    assert {step: row["train/loss"] for step, row in run.steps.items()} == {1: 3.0, 2: 2.0, 3: 1.5, 4: 1.0}
    assert run.evaluations[4]["validation/loss"] == 9.0
    assert run.last.config["model"]["name"] == "tiny"


def test_a_wandb_file_cut_short_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    sink = open_wandb(WandbConfig(), run_id="r1", folder=tmp_path, experiment="e", default_name="n", config={})
    assert sink is not None
    with Sinks([sink]) as sinks:
        for step in range(1, 200):
            sinks.write(report(step=step))
    [path] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    run = load_run(path)
    assert run.ending == "not ended" and 50 < len(run.steps) < 199
    assert set(run.steps) == set(range(1, len(run.steps) + 1))


def test_rows_that_are_not_of_steps_are_passed_over(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", rows=[step_row(1), {"step": "x"}, {"loss_curve": 1}, step_row(2)])
    write_lines(folder / "ranks.jsonl", [{"step": 2, "ranks": []}, {"step": 9, "ranks": []}])
    run = load_run(folder)
    assert (list(run.steps), list(run.ranks)) == ([1, 2], [2])


@pytest.mark.parametrize("value", [None, "NaN", [1.0], {}])
def test_what_is_no_number_in_a_row_is_noted_and_left_out(value: object, tmp_path: Path) -> None:
    rows = [step_row(1), step_row(2, train__loss=value), step_row(3, train__grad_norm=value, tokens=value), step_row(4)]
    run = load_run(write_run(tmp_path / "a", rows=rows))
    assert list(run.steps) == [1, 3, 4] and "train/grad_norm" not in run.steps[3]
    assert set(run.notes) == {
        f"{name} is no number in 1 rows and left out there" for name in ("train/loss", "tokens", "train/grad_norm")
    }


def test_a_file_of_garbage_gives_one_note_with_a_count(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "timeline.jsonl").write_bytes(b"\xff\x00\n3\n" * 50 + b'{"event": "end", "step": null}\n')
    run = load_run(folder)
    assert run.notes == ["timeline.jsonl: 100 lines are no rows and left out, the first is line 1"]
    assert [event["step"] for event in run.events] == [0]


@pytest.mark.parametrize("name", ["config.json", "run.json", "plan.json", "starts/1.json", "prediction.json"])
@pytest.mark.parametrize("text", ["[]", '{"train": 3, "model": [], "identity": 1, "config": 2, "plan": 3}'])
def test_records_of_another_kind_are_left_out_without_a_traceback(name: str, text: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    if not name.startswith("starts"):
        (folder / "starts" / "1.json").unlink()
    (folder / name).write_text(text)
    assert main([str(folder), str(write_run(tmp_path / "b")), "--incident", "--out", str(tmp_path / "r.html")]) == 0
    assert main([str(folder), "--gate", str(folder)]) in (0, 1)


def test_a_group_of_the_config_that_is_none_is_noted(tmp_path: Path) -> None:
    config = plain_config() | {"train": 3, "precision": "fp32"}
    config["model"]["num_layers"] = "many"
    assert load_run(write_run(tmp_path / "a", config=config, identity={"hosts": "a", "packages": []})).notes == [
        "identity: hosts is of another kind and left out",
        "identity: packages is of another kind and left out",
        "config: precision is no group of knobs and left out",
        "config: train is no group of knobs and left out",
        "config: model.num_layers=many is no number and left out",
    ]
