"""Commands on a host of the cluster tests, and small runs of the recipe: what these tests share."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.cluster.hosts import Host, Hosts

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PRETRAIN = str(ROOT / "recipes" / "pretrain.py")
TINY = [
    "model=llama_tiny", "data.sequence_length=32", "train.train_iters=3", "train.eval_interval=0",
    "telemetry=quiet", "run.id=r",
]  # fmt: skip


def environ(hosts: Hosts, **more: str) -> dict[str, str]:
    """A user's, at a shell of the first host; nothing of the one that runs the tests."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TORCH_EXTENSIONS_DIR") if name in os.environ}
    ours = {"PDSH_SSH_ARGS_APPEND": hosts.ssh_options, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return kept | ours | more


def finish(
    host: Host, command: list[str], folder: Path, environment: dict[str, str], *, timeout: float = 240
) -> tuple[int, str]:
    """(exit code, output) of the command on a host, in a folder."""
    output = folder / "output.txt"
    started = host.start(command, folder=folder, output=output, environ=environment)
    return started.wait(timeout=timeout), output.read_text()


def losses(folder: Path) -> list[float]:
    lines = (folder / "runs" / "default" / "r" / "metrics.jsonl").read_text().splitlines()
    return [row["train/loss"] for row in map(json.loads, lines) if "train/loss" in row]


MULTINODE = str(ROOT / "launch" / "multinode.sh")
SHOWS = str(ROOT / "tests" / "cluster" / "shows.py")


def shown(folder: Path, rank: int) -> dict[str, Any]:
    """What a rank of shows.py wrote."""
    return json.loads((folder / f"rank-{rank}.json").read_text())
