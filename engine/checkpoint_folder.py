"""A checkpoint's folder on disk: its name, its manifest, which of several are kept. No torch.

    checkpoints/step-00001200/weights/       fp32 master weights, transformers' names and config.json: from_pretrained
                              exp_avg/       AdamW's moments under the same names and shapes
                              exp_avg_sq/
                              manifest.json  progress, config, plan, code, corpus, checksums

A folder with its final name is complete. The latest is found by looking, by number, not by a pointer that can lie.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from conf.weight_sources import ADAPTER_CONFIG as ADAPTER_CONFIG
from conf.weight_sources import MANIFEST, WEIGHTS, list_checkpoints

FORMAT = 1
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = (WEIGHTS, *MOMENTS)  # folders of a checkpoint: fp32 weights, AdamW's moments


class DamagedError(ValueError):
    """A checkpoint that is not what was written."""


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Of a complete checkpoint's folder; 0 where its name is another's."""
    return next((step for step, one in list_checkpoints(path.parent) if one == path), 0)


def partial_path(folder: Path, step: int) -> Path:
    """Where a checkpoint is written before it has its name."""
    return folder / f".step-{step:08d}.partial"


def write_manifest(path: Path, manifest: dict[str, Any]) -> str:
    """Write the manifest with its own checksum, which it returns, and flush it to disk."""
    checksum = _digest_of(manifest)
    with (path / MANIFEST).open("w") as file:
        json.dump(manifest | {"checksum": checksum}, file)
        file.flush()
        os.fsync(file.fileno())
    return checksum


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises DamagedError where it is torn or was changed."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        checksum = manifest.pop("checksum")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise DamagedError(f"{path / MANIFEST} cannot be read: {error!r}") from None
    if checksum != _digest_of(manifest):
        raise DamagedError(f"{path / MANIFEST} is not what was written")
    if manifest["format"] != FORMAT:
        raise DamagedError(f"{path / MANIFEST} has format {manifest['format']}, this version reads {FORMAT}")
    return manifest


def set_aside(folder: Path, *, after: int) -> list[Path]:
    """Rename checkpoints of later steps: of an attempt that a run has gone back behind, or damaged ones."""
    now = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    later = [path for step, path in list_checkpoints(folder) if step > after]
    return [path.rename(path.with_name(f"{path.name}.aside-{now}")) for path in later]


def remove_leftovers(folder: Path) -> None:
    """What a killed start was writing or deleting; for the process that holds the run's folder."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path)


def prune(folder: Path, *, keep_last: int, keep_every: int, protected: Sequence[int] = ()) -> None:
    """Delete checkpoints but the newest `keep_last` (-1: all), each `keep_every`-th step (0: none) and `protected`."""
    complete = list_checkpoints(folder)
    kept = {step for step, _ in (complete if keep_last < 0 else complete[-keep_last:])} | set(protected)
    for step, path in complete:
        if step not in kept and not (keep_every and step % keep_every == 0):
            doomed = path.with_name(f".{path.name}.deleted")
            path.rename(doomed)  # at once: a half deleted folder must not look like a checkpoint
            shutil.rmtree(doomed)


def _digest_of(manifest: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(manifest, sort_keys=True).encode())
