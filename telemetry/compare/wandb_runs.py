"""A run read from wandb's offline files alone, for comparing runs whose own folder is gone.

The starts of a run that went on are folders of their own; those beside the named one that carry its id are read with
it, oldest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from telemetry.wandb_files import WandbFile, read_file


@dataclass(frozen=True)
class WandbParts:
    """What wandb's files say of a run."""

    name: str
    rows: Sequence[dict[str, Any]]
    config: dict[str, Any]
    identity: dict[str, Any]
    ending: str
    notes: Sequence[str]


def is_wandb(path: Path) -> bool:
    """A .wandb file, or the folder of one."""
    return path.suffix == ".wandb" or (path.is_dir() and any(path.glob("*.wandb")))


def wandb_parts(path: Path) -> WandbParts:
    """Raises ValueError where a file is none of wandb's."""
    folder = path.parent if path.suffix == ".wandb" else path
    run_id = _id(next(folder.glob("*.wandb")))
    beside = folder.parent.glob(f"offline-run-*-{run_id}/*.wandb") if folder.name.startswith("offline-run-") else []
    paths = sorted({*folder.glob("*.wandb"), *beside}, key=lambda one: (one.parent.name, one.stat().st_ctime))
    files = [read_file(one) for one in paths]
    notes = [f"{one.path.name} is torn at its end" for one in files if one.torn]
    if len(files) > 1:
        notes.append(f"{len(files)} starts of the run are read together")
    config: dict[str, Any] = {}
    for one in files:
        config |= {key: value for key, value in one.config.items() if key != "_wandb"}
    profile = config.pop("profile", None)
    identity = {"id": run_id} | ({"profile": profile} if profile else {}) | _identity(files[-1])
    rows = [row for one in files for row in one.rows]
    return WandbParts(run_id, rows, config, identity, _ending(files[-1]), notes)


def _id(path: Path) -> str:
    """run-ID.wandb -> ID."""
    return path.stem.removeprefix("run-")


def _identity(file: WandbFile) -> dict[str, Any]:
    run = file.run
    if run is None:
        return {}
    found: dict[str, Any] = {"hosts": [run.host]} if run.host else {}
    if run.git.commit:
        found["git_commit"] = run.git.commit
    return found


def _ending(file: WandbFile) -> str:
    if file.exit_code is None:
        return "not ended"
    return "complete" if file.exit_code == 0 else "failed"
