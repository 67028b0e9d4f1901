"""Whole runs through the launchers: late ranks, two launches at once, odd corpora; cases E2, E4, F1, F4, F8."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.distributed import free_port
from tests.engine.launched import BIN, FAULTY, LOCAL, ROOT, TINY, events_of, finish, start, steps_of

PRETRAIN = str(ROOT / "recipes" / "pretrain.py")
SHORT = [*TINY, "train.train_iters=3", "telemetry.wandb.mode=disabled"]
PYTHON = str(BIN / "python")
LAUNCHERS = {
    "local.sh": [str(LOCAL), "-n", "2"],
    "deepspeed": [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", "31521"],
    "torchrun": [str(BIN / "torchrun"), "--nproc-per-node", "2", "--master-port", "31522"],
    "elastic.py": [PYTHON, str(ROOT / "launch" / "elastic.py"), "--nproc-per-node", "2", "--master-port", "31523"],
    "sweep.py": [PYTHON, str(ROOT / "launch" / "sweep.py"), "--id", "s"],
}
pytestmark = pytest.mark.slow


def write_documents(folder: Path, *counts: int) -> Path:
    folder.mkdir(parents=True)
    for number, count in enumerate(counts):
        rows = [json.dumps({"text": f"file {number} row {row} " + "words " * 40}) for row in range(count)]
        (folder / f"{number}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


@pytest.mark.parametrize("spelling", ["--local_rank={}", "--local-rank={}", None])
def test_a_late_rank_joins_and_there_is_one_folder(spelling: str | None, tmp_path: Path) -> None:
    """Case F1: rank 1 comes two seconds late; relative data is relative to the caller."""
    write_documents(tmp_path / "data", 40)
    ranks, port = [], free_port()
    options = [*SHORT[:3], "train.train_iters=3", "telemetry.wandb.mode=disabled", "train.eval_interval=0"]
    for rank in range(2):
        if rank == 1:
            time.sleep(2)
        command = [sys.executable, PRETRAIN, *([spelling.format(rank)] if spelling else []), *options]
        command += ["data.sources.0.path=./data/0.jsonl"]
        environ = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu",
        }  # fmt: skip
        ranks.append(
            subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    outputs = [rank.communicate(timeout=120)[0].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    (run,) = (tmp_path / "runs" / "default").iterdir()
    assert steps_of(run) == [1, 2, 3]
    assert json.loads((run / "config.json").read_text())["parallel"]["pp"] == 2


def test_two_launches_at_once_both_finish(tmp_path: Path) -> None:
    """Case F4."""
    processes = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        processes.append(start([str(LOCAL), "-n", "2", PRETRAIN, *SHORT], tmp_path / name))
    for name, process in zip(("one", "two"), processes, strict=True):
        assert process.wait(timeout=180) == 0, (tmp_path / name / "output.txt").read_text()
        assert steps_of(tmp_path / name / "runs" / "default" / "r") == [1, 2, 3]


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_port_that_another_program_has_ends_plain_launchers_with_its_number(launcher: str, tmp_path: Path) -> None:
    """Case F4; launch/local.sh and elastic.py say it in a line of their own (tests/launch/)."""
    port = LAUNCHERS[launcher][-1]
    with socket.create_server(("127.0.0.1", int(port))):
        code, output = finish([*LAUNCHERS[launcher], PRETRAIN, *SHORT], tmp_path, timeout=60)
    assert code != 0 and f"port: {port}," in output and "EADDRINUSE" in output, output
    assert not (tmp_path / "runs" / "default" / "r" / "metrics.jsonl").exists()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_late_rank_joins_the_one_run_and_a_stale_lock_of_a_build_holds_nothing_up(
    launcher: str, tmp_path: Path
) -> None:
    """Cases F1 and F8: a killed build of DeepSpeed's CPU collectives left its lock; that op is never built here."""
    write_documents(tmp_path / "data", 40)
    (tmp_path / "extensions" / "deepspeed_shm_comm").mkdir(parents=True)
    (tmp_path / "extensions" / "deepspeed_shm_comm" / "lock").touch()
    words = [word for word in SHORT if not word.startswith("run.id=")] + ["data.sources=[{path: ./data/0.jsonl}]"]
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"), "FAULT": "late"}
    code, output = finish([*LAUNCHERS[launcher], str(FAULTY), *words], tmp_path, timeout=120, **environ)
    assert code == 0, output
    (run,) = [path.parent for path in (tmp_path / "runs").rglob("run.json")]
    assert steps_of(run) == [1, 2, 3]
    assert sorted(path.name for path in (tmp_path / "extensions").rglob("*")) == ["deepspeed_shm_comm", "lock"]


@pytest.mark.parametrize("streaming", [False, True])
def test_shards_of_unequal_size_give_all_ranks_as_many_steps(streaming: bool, tmp_path: Path) -> None:
    """Case E2: 5, 1 and 9 rows, two data ranks, more than one epoch."""
    folder = write_documents(tmp_path / "shards", 5, 1, 9)
    options = [
        *SHORT, "parallel.pp=1", f"data.sources.0.path={folder}", f"data.sources.0.streaming={str(streaming).lower()}",
        "data.validation_fraction=0", "train.global_batch_size=2", "train.train_iters=80",
    ]  # fmt: skip
    code, output = finish([str(LOCAL), "-n", "2", PRETRAIN, *options], tmp_path)
    assert code == 0, output
    assert steps_of(tmp_path / "runs" / "default" / "r") == list(range(1, 81))


@pytest.mark.parametrize("tp", [1, 2])
def test_a_tokenizer_larger_than_the_vocabulary_is_refused_before_the_first_step(tp: int, tmp_path: Path) -> None:
    """Case E4."""
    options = [*SHORT, "parallel.pp=1", f"parallel.tp={tp}", "model.vocab_size=256"]
    code, output = finish([str(LOCAL), "-n", str(tp), PRETRAIN, *options], tmp_path)
    assert code == 2 and "257" in output and "256" in output, output
    assert not (tmp_path / "runs" / "default").exists()


def test_a_run_that_was_killed_after_its_last_step_comes_to_its_end(tmp_path: Path) -> None:
    command = [str(BIN / "python"), PRETRAIN, *SHORT, "parallel.pp=1", "checkpoint.interval=3", "resume=auto"]
    environ: dict[str, Any] = {"LOCAL_RANK": "0"}
    assert finish(command, tmp_path, **environ)[0] == 0
    run = tmp_path / "runs" / "default" / "r"
    (run / "complete.json").unlink()
    code, output = finish(command, tmp_path, **environ)
    assert code == 0 and "no step was left to train" in output, output
    assert (run / "complete.json").exists() and steps_of(run) == [1, 2, 3]
    assert [event["event"] for event in events_of(run)] == ["start", "checkpoint", "start", "resume"]
