"""Case F5: one rank of pp=2 x dp=2 dies: the whole run ends within a minute, not with 0, with one traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.telemetry.wandb_files import exit_code

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SCRIPT = ROOT / "tests" / "engine" / "faulty_pretrain.py"
LAUNCHERS = {
    "local.sh": [str(ROOT / "launch" / "local.sh"), "-n", "4"],
    "deepspeed": [str(BIN / "deepspeed"), "--num_gpus", "4", "--master_port", "29713"],
    "torchrun": [str(BIN / "torchrun"), "--nproc-per-node", "4", "--master-port", "29714"],
}
OVERRIDES = ["model=llama_tiny", "parallel=tp1_pp2", "data.sequence_length=32", "train.eval_interval=0", "run.id=r"]
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("launcher", "fault"),
    [
        ("local.sh", "kill"),
        *(
            pytest.param(launcher, fault, marks=SLOW)
            for launcher in LAUNCHERS
            for fault in ("raise", "exit", "kill")
            if (launcher, fault) != ("local.sh", "kill")
        ),
    ],
)
def test_one_dead_rank_ends_the_run(launcher: str, fault: str, tmp_path: Path) -> None:
    environ = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
    done = subprocess.run(
        [*LAUNCHERS[launcher], str(SCRIPT), *OVERRIDES],
        cwd=tmp_path, env=environ | {"FAULT": fault, "DS_ACCELERATOR": "cpu"}, capture_output=True, text=True,
        timeout=180, check=False,
    )  # fmt: skip
    ended = time.time()
    folder = tmp_path / "runs" / "default" / "r"
    assert done.returncode != 0, done.stdout + done.stderr
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
    assert ended - (folder / "metrics.jsonl").stat().st_mtime < 60
    assert not (folder / "complete.json").exists()
    assert exit_code(folder) != 0, "wandb shows the run as failed"
    assert not [p.pid for p in psutil.process_iter(["cmdline"]) if str(SCRIPT) in (p.info["cmdline"] or [])]
    if fault == "raise":
        assert json.loads((folder / "failed.json").read_text())["rank"] == 2
        assert done.stderr.count("failed: Traceback (most recent call last)") == 1, done.stderr
        assert "the fault that was asked for" in done.stderr


@pytest.mark.slow
def test_ranks_end_when_only_deepspeeds_runner_is_interrupted(tmp_path: Path) -> None:
    """Its per-node process and the ranks would train on, without a parent."""
    environ = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
    recipe = str(ROOT / "recipes" / "pretrain.py")
    command = [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", "29715", recipe, *OVERRIDES]
    runner = subprocess.Popen(
        [*command, "train.train_iters=100000"],
        cwd=tmp_path, env=environ | {"DS_ACCELERATOR": "cpu"}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    metrics = tmp_path / "runs" / "default" / "r" / "metrics.jsonl"
    end = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text()):
        assert time.monotonic() < end, "it did not start"
        time.sleep(0.5)
    runner.send_signal(signal.SIGINT)
    runner.wait(timeout=30)
    end = time.monotonic() + 30
    while [p.pid for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)]:
        assert time.monotonic() < end, "ranks are left over"
        time.sleep(0.5)
    last = json.loads((metrics.parent / "timeline.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "stopped on request"
    assert (metrics.parent / "checkpoints" / f"step-{last['step']:08d}").is_dir()
