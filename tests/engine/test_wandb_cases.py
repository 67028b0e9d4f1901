"""Whole runs and wandb, cases G1 to G5: one run and no more, nothing lost over a resume, no trouble becomes ours."""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engine.launched import BIN, FAULTY, LOCAL, ROOT, TINY, events_of, finish, steps_of
from tests.telemetry.wandb_files import read, segments, stored
from tests.telemetry.wandb_reader import history, of_kind, state

RECIPE = str(ROOT / "recipes" / "pretrain.py")
PYTHON = [str(BIN / "python"), RECIPE]
THREE = [*TINY, "train.train_iters=3", "telemetry.plot=false"]  # no image: a row of wandb's history is a step
ALONE = [*THREE, "parallel=tp1"]


def check_three_steps(run: Path) -> None:
    """Exactly one wandb run, of three rows with a finite loss, learning rate and gradient norm each."""
    rows = history(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for name in ("train/loss", "train/learning_rate", "train/grad_norm"):
        assert all(math.isfinite(row[name]) and row[name] > 0 for row in rows), name


@pytest.mark.slow
def test_g1_four_ranks_leave_one_wandb_run_with_a_loss_in_each_row(tmp_path: Path) -> None:
    code, output = finish([str(LOCAL), "-n", "4", RECIPE, *THREE], tmp_path)  # pp=2 x dp=2: the loss is on other ranks
    assert code == 0, output
    run = tmp_path / "runs" / "default" / "r"
    check_three_steps(run)
    assert [path.parents[1] for path in tmp_path.rglob("offline-run-*")] == [run]
    assert state(run)["state"] == "finished"


@pytest.mark.slow
def test_g1_two_nodes_where_each_rank_is_the_first_of_its_own_leave_one_wandb_run(tmp_path: Path) -> None:
    """LOCAL_RANK 0 twice; the nodes share no disk."""
    nodes = []
    for rank in (0, 1):
        folder = tmp_path / f"node{rank}"
        folder.mkdir()
        environ = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "34217", "DS_ACCELERATOR": "cpu"}
        command = [*PYTHON, *THREE, f"run.dir={tmp_path}/runs"]
        nodes.append(subprocess.Popen(command, cwd=folder, env=os.environ | environ))
    assert [node.wait(timeout=180) for node in nodes] == [0, 0]
    check_three_steps(tmp_path / "runs" / "default" / "r")
    assert len(list(tmp_path.rglob("offline-run-*"))) == 1


@pytest.mark.slow
def test_g2_rows_of_evaluations_go_on_at_the_training_step_after_a_resume(tmp_path: Path) -> None:
    """Killed before step 7 with a checkpoint at 4; evaluated every second step."""
    command = [str(LOCAL), "-n", "2", "-r", "1", str(FAULTY), *TINY, "train.train_iters=8", "checkpoint.interval=4"]
    command += ["train.eval_interval=2", "train.eval_samples=8"]
    fault = {"FAULT": "kill", "FAULT_STEP": "7", "FAULT_RANK": "1", "FAULT_ONCE": str(tmp_path / "struck")}
    code, output = finish(command, tmp_path, **fault)
    assert code == 0, output
    run = tmp_path / "runs" / "default" / "r"
    rows, _, identity = read(segments(run)[-1])
    assert identity.run_id == "r"
    assert [row["step"] for row in rows if "train/loss" in row] == [5, 6, 7, 8]
    assert [row["step"] for row in rows if "validation/loss" in row] == [6, 8]
    assert "less than current step" not in output


@pytest.mark.slow
def test_g3_what_wandb_stores_of_a_config_is_plain_and_resolved(tmp_path: Path) -> None:
    """Interpolations, a data source of 200 characters, a name and a tag that are too long."""
    source = tmp_path / ("d" * 196) / "x.jsonl"
    source.parent.mkdir()
    source.write_text("".join(f'{{"text": "{n} plus {n} is {2 * n}. "}}\n' * 5 for n in range(400)))
    overrides = ["model.name=tiny", "telemetry.wandb.name=${model.name}-${parallel.tp}", "run.experiment=" + "e" * 150]
    overrides += [f"data.sources=[{{path: {source}}}]", "telemetry.wandb.tags=[" + "t" * 100 + "]"]
    code, output = finish([*PYTHON, *ALONE, *overrides], tmp_path)
    assert code == 0, output
    run = tmp_path / "runs" / ("e" * 150) / "r"
    check_three_steps(run)
    _, config, identity = stored(run)
    assert config["telemetry"]["wandb"]["name"] == identity.display_name == "tiny-1"
    assert config["data"]["sources"][0]["path"] == str(source) and "${" not in json.dumps(config)
    assert (identity.run_group, "t" * 64 in identity.tags) == ("e" * 128, True)
    assert output.count("cut to") == 2


STUBS = {
    "no wandb": ("wandb.py", 'raise ImportError("no wandb here")'),
    "log raises": (
        "sitecustomize.py",
        "from wandb.sdk.wandb_run import Run\n"
        "plain = Run.log\n"
        "def log(self, data, *arguments, **named):\n"
        "    if data.get('step') == 2:\n"
        "        raise RuntimeError('quota')\n"
        "    return plain(self, data, *arguments, **named)\n"
        "Run.log = log\n",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["no service", *STUBS])
def test_g4_trouble_with_wandb_is_one_warning_and_the_same_run(trouble: str, tmp_path: Path) -> None:
    environ, overrides = {}, []
    if trouble == "no service":
        environ = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
        overrides = ["telemetry.wandb.mode=online", "telemetry.wandb.init_timeout_s=10"]
    else:
        name, text = STUBS[trouble]
        (tmp_path / "stub").mkdir()
        (tmp_path / "stub" / name).write_text(text)
        environ = {"PYTHONPATH": f"{tmp_path / 'stub'}:{os.environ.get('PYTHONPATH', '')}"}
    began = time.monotonic()
    code, output = finish([*PYTHON, *ALONE, *overrides], tmp_path, **environ)
    assert code == 0 and time.monotonic() - began < 60, output
    run = tmp_path / "runs" / "default" / "r"
    assert steps_of(run) == [1, 2, 3] and (run / "complete.json").exists()
    assert output.count("warning: ") == 1 and "Traceback" not in output
    if trouble == "no service":
        check_three_steps(run)  # offline
    code, output = finish([*PYTHON, *ALONE, "run.id=untroubled", "telemetry.wandb.mode=disabled"], tmp_path)
    assert code == 0 and losses(run) == losses(run.parent / "untroubled")


def losses(run: Path) -> list[Any]:
    return [json.loads(line)["train/loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_g5_each_job_of_a_multirun_is_a_run_of_its_own_and_a_failed_one_is_shown_as_failed(tmp_path: Path) -> None:
    """The second job's learning rate makes the loss infinite in its second step."""
    sweep = ["-m", "train.lr=1e-3,1e30", "optimizer.clip_grad=0", "train.max_bad_steps=1"]
    overrides = [one for one in ALONE if not one.startswith("run.id")]
    code, output = finish([*PYTHON, *sweep, *overrides], tmp_path)
    assert code == 1 and "1 of 2 jobs succeeded" in output
    runs = sorted((tmp_path / "runs" / "default").iterdir())
    [[first], [second]] = [of_kind(run, "run") for run in runs]
    assert first["run_id"] != second["run_id"] and first["run_group"] == second["run_group"] == "default"
    assert [one["config"]["update"]["train"]["lr"] for one in (first, second)] == [1e-3, 1e30]
    assert [(state(run)["state"], state(run)["exit_code"]) for run in runs] == [("finished", 0), ("failed", 1)]
    assert [events_of(run)[-1]["outcome"] for run in runs] == ["complete", "failed"]
    check_three_steps(runs[0])
    assert [row["step"] for row in history(runs[1])] == steps_of(runs[1])
