"""Starting runs through the launchers, watching and signalling them: what the fault tests share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
LOCAL = ROOT / "launch" / "local.sh"
FAULTY = ROOT / "tests" / "engine" / "faulty_pretrain.py"
TINY = ["model=llama_tiny", "parallel=tp1_pp2", "data.sequence_length=32", "train.eval_interval=0", "run.id=r"]


def start(command: list[str], folder: Path, **environ: str) -> subprocess.Popen[str]:
    """The command in `folder`, in a session of its own, its output in output.txt."""
    aside = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "MASTER_PORT")
    inherited = {key: value for key, value in os.environ.items() if key not in aside}
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(
            command, cwd=folder, env=inherited | {"DS_ACCELERATOR": "cpu"} | environ, text=True,
            start_new_session=True, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip


def finish(command: list[str], folder: Path, *, timeout: float = 180, **environ: str) -> tuple[int, str]:
    """(exit code, output) of the command."""
    process = start(command, folder, **environ)
    return process.wait(timeout=timeout), (folder / "output.txt").read_text()


def wait_for(condition: Callable[[], Any], *, seconds: float, what: str) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.1)
    return found


def steps_of(run: Path) -> list[int]:
    """Steps in metrics.jsonl, in the order they were written."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}") and "train/loss" in line]


def events_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "timeline.jsonl").read_text().splitlines()]


def processes_in(folder: Path, word: str) -> list[psutil.Process]:
    """Processes started in `folder` that have `word` on their command line."""
    found = []
    for process in psutil.process_iter(["cwd", "cmdline"]):
        if process.info["cwd"] == str(folder) and word in (process.info["cmdline"] or []):
            found.append(process)
    return found
