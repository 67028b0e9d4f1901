"""launch/sweep.py with runs that train: one wandb run a job, one group (case G5), and failed jobs in the report."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.engine.launched import FAULTY, ROOT, events_of, finish, steps_of
from tests.telemetry.wandb_files import exit_code, stored

SWEEP = [sys.executable, str(ROOT / "launch" / "sweep.py"), "--id", "s"]
SHORT = ["model=llama_tiny", "data.sequence_length=32", "train.sample_tokens=0", "train.eval_samples=8"]


def trained(folder: Path) -> list[int]:
    rows, _, _ = stored(folder)
    return [row["step"] for row in rows if "train/loss" in row]


def test_every_job_is_a_wandb_run_of_its_own_in_one_group_with_its_own_config(tmp_path: Path) -> None:
    """Case G5; also where the caller's environment names one run."""
    words = ["--at-once", "2", "-m", "train.lr=1e-3,3e-3", "train.train_iters=2", *SHORT]
    code, output = finish([*SWEEP, *words], tmp_path, WANDB_RUN_ID="same")
    assert code == 0, output
    folders = [tmp_path / "runs" / "s" / f"s-0{number}" for number in range(2)]
    kept = [stored(folder) for folder in folders]  # exactly one offline-run-* in each
    assert len(list(tmp_path.rglob("offline-run-*"))) == 2
    assert [run.run_id for _, _, run in kept] == ["s-00", "s-01"]
    assert [run.run_group for _, _, run in kept] == ["s", "s"]
    assert [run.display_name for _, _, run in kept] == ["train.lr=0.001", "train.lr=0.003"]
    assert [config["train"]["lr"] for _, config, _ in kept] == [1e-3, 3e-3]
    assert [trained(folder) for folder in folders] == [[1, 2], [1, 2]]
    assert (tmp_path / "runs" / "s" / "comparison" / "report.html").exists() and "s-01  finished" in output


@pytest.mark.slow
def test_a_job_that_fails_is_failed_in_wandb_and_in_the_report_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """The second job has the rank that the fault strikes, once; resumed, it trains what it lacks."""
    words = ["-m", str(FAULTY), "parallel=tp1,tp1_pp2,tp2", "train.train_iters=4", "checkpoint.interval=1", *SHORT]
    fault = {"FAULT": "raise", "FAULT_RANK": "1", "FAULT_ONCE": str(tmp_path / "once")}
    code, output = finish([*SWEEP, *words], tmp_path, timeout=400, **fault)
    assert code == 1, output
    folders = [tmp_path / "runs" / "s" / f"s-0{number}" for number in range(3)]
    assert [exit_code(folder) for folder in folders] == [0, 1, 0]
    assert [line.split()[1:] for line in output.splitlines() if line.startswith("outcome")] == [
        ["complete", "failed", "complete"]
    ]
    assert "s-01 failed with code 1 after " in output and "the fault that was asked for" in output
    code, output = finish([*SWEEP, *words], tmp_path, timeout=400, **fault)
    assert code == 0 and output.count("is finished already") == 2
    (resumed,) = [event["step"] for event in events_of(folders[1]) if event["event"] == "resume"]
    assert resumed in (1, 2)  # the checkpoint of step 2 may have been under way: then that step is trained again
    assert (folders[1] / "complete.json").exists() and sorted(set(steps_of(folders[1]))) == [1, 2, 3, 4]
    assert all((folder / "run.json").exists() and not (folder / "failed.json").exists() for folder in folders)


@pytest.mark.slow
def test_a_search_over_runs_minimises_their_validation_loss(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="hydra-optuna-sweeper: docs/sweeps.md")
    words = ["-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "train.lr=tag(log, interval(1e-4, 1e-2))"]
    code, output = finish([*SWEEP, *words, "train.train_iters=3", *SHORT], tmp_path, timeout=400)
    assert code == 0, output
    folders = sorted((tmp_path / "runs" / "s").glob("s-0?"))
    rows = [[json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] for folder in folders]
    losses = [next(row["validation/loss"] for row in reversed(run) if "validation/loss" in row) for run in rows]
    best = json.loads((folders[losses.index(min(losses))] / "config.json").read_text())["train"]["lr"]
    assert len(folders) == 4 and f"train.lr: {best!r}" in output and f"best_value: {min(losses)!r}" in output
