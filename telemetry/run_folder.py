"""A run's identity and its folder runs/<experiment>/<id>/: decided once by rank 0, the same on every rank."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from conf.schema import RunConfig

PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "hydra-core", "omegaconf", "wandb", "tokenizers", "numpy")


def new_run_id() -> str:
    """UTC time and four random hex digits: sorts by time, unique without asking anyone."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + "-" + secrets.token_hex(2)


def claim_run_folder(run: RunConfig) -> Path | None:
    """On rank 0 make and return run.dir/experiment/id, relative to the folder of the call; None on other ranks.

    ValueError where the folder belongs to another run already or cannot be made.
    """
    if os.environ.get("RANK", "0") != "0":
        return None
    folder = Path(run.dir).expanduser().absolute() / run.experiment / (run.id or new_run_id())
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        if folder.is_dir():
            raise ValueError(f"run.id={run.id}: {folder} is another run's; choose another id or leave it out") from None
        raise ValueError(f"run.dir={run.dir} cannot be written: {folder} is a file; choose a folder") from None
    except OSError as error:
        raise ValueError(f"run.dir={run.dir} cannot be written: {error.strerror}; choose another folder") from None
    return folder


def write_json(path: Path, value: Any) -> None:
    """Write through a temporary name, so that a reader never sees half a file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2, default=str) + "\n")
    os.replace(temporary, path)


def identity(run_id: str, *, config_fingerprint: str, corpus_fingerprint: str, seed: int, hosts: list[str]) -> dict:
    """What ran, where, from which code: the content of run.json."""
    return {
        "id": run_id,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join([sys.executable, *sys.argv]),
        "config_fingerprint": config_fingerprint,
        "corpus_fingerprint": corpus_fingerprint,
        "seed": seed,
        "hosts": hosts,
        "git_commit": git_commit(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "python": sys.version.split()[0],
    }


def git_commit() -> str | None:
    """Commit of the code, with "+changes" where files differ from it; None outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        commit = _git(here, "rev-parse", "HEAD")
        return commit + ("+changes" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()
