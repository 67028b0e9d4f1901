"""An offline run as wandb itself reads it: `wandb leet inspect`, which is wandb-core behind its command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def inspected(folder: Path) -> list[dict[str, Any]]:
    """Every record of the one offline run under `folder`, in their order."""
    [run] = folder.glob("wandb/offline-run-*")
    return [json.loads(line) for line in _inspect(run).splitlines()]


def of_kind(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record[kind] for record in inspected(folder) if record["type"] == kind]


def history(folder: Path) -> list[dict[str, Any]]:
    return [one["item"] for one in of_kind(folder, "history")]


def state(folder: Path) -> dict[str, Any]:
    """What the run came to: state, exit_code, summary, config."""
    [run] = folder.glob("wandb/offline-run-*")
    return json.loads(_inspect(run, "--summary"))


def _inspect(run: Path, *flags: str) -> str:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *flags, str(run)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
