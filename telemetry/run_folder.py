"""A run's identity and its folder runs/<experiment>/<id>/: decided once by rank 0, the same on every rank."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from conf.schema import RunConfig
from telemetry.redact import redacted

PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "hydra-core", "omegaconf", "wandb", "tokenizers", "numpy")


CODE = ("*.py", "*.yaml", "*.sh")


def new_run_id() -> str:
    """UTC time and four random hex digits: sorts by time, unique without asking anyone."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + "-" + secrets.token_hex(2)


class InUseError(ValueError):
    """A live process has the run's folder."""


@dataclass(frozen=True)
class RunFolder:
    """A run's folder and the lock that says it is in use: held until this process ends, however it ends."""

    path: Path
    lock: IO[str]


def claim_run_folder(run: RunConfig) -> RunFolder:
    """Make run.dir/experiment/id, relative to the folder of the call; for rank 0.

    ValueError where the folder belongs to another run already or cannot be made.
    """
    folder = run_folder_path(run, run.id or new_run_id())
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        if folder.is_dir():
            raise ValueError(
                f"run.id={run.id}: {folder} is another run's ({whose(folder)}); resume=auto goes on with it, or "
                "choose another id"
            ) from None
        raise ValueError(f"run.dir={run.dir} cannot be written: {folder} is a file; choose a folder") from None
    except OSError as error:
        raise ValueError(f"run.dir={run.dir} cannot be written: {error.strerror}; choose another folder") from None
    return lock_run_folder(folder)


def run_folder_path(run: RunConfig, run_id: str) -> Path:
    return Path(run.dir).expanduser().absolute() / run.experiment / run_id


def lock_run_folder(folder: Path) -> RunFolder:
    """InUseError, with the identity of the run that holds it, where the folder is in use."""
    lock = os.fdopen(os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT, 0o644), "r+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InUseError(f"{folder} is in use by {whose(folder)}; wait for it or choose another run.id") from None
    lock.write(f"process {os.getpid()} on {socket.gethostname()} since {utc_now()}")
    lock.flush()
    lock.truncate()
    return RunFolder(folder, lock)


def whose(folder: Path) -> str:
    """The run of a folder in words: its id and the process that last held it."""
    lock = folder / "run.lock"
    return f"run {folder.name}, {lock.read_text() if lock.exists() else 'not started yet'}"


def utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def write_json(path: Path, value: Any) -> None:
    """Write, without secrets, through a temporary name, so that a reader never sees half a file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(redacted(value), indent=2, default=str) + "\n")
    os.replace(temporary, path)


def identity(run_id: str, **about: Any) -> dict[str, Any]:
    """What ran, when and from which code: the content of run.json. about: what the caller knows."""
    return {
        "id": run_id,
        "started": utc_now(),
        "command": shlex.join([sys.executable, *sys.argv]),
        "launch": os.environ.get("LAUNCH_ID"),
        **about,
        "git_commit": git_commit(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "python": sys.version.split()[0],
    }


def restart_record() -> dict[str, Any] | None:
    """What launch/ says where it started this run again: why, on which hosts, under which plan. None: it did not."""
    text = os.environ.get("LAUNCH_RESTART")
    return None if text is None else json.loads(text)


def write_start(folder: Path, record: dict[str, Any], **files: Any) -> int:
    """Keep what a start of the run began with: its number, from 1.

    starts/N.json holds record (as "identity") and files, starts/N.patch the code's uncommitted changes, where there are
    any. run.json is the first start's record; NAME.json of each file the newest start's.
    """
    starts = folder / "starts"
    starts.mkdir(exist_ok=True)
    number = 1 + len(list(starts.glob("*.json")))
    record = record | {"start": number}
    patch = git_changes()
    if patch:
        (starts / f"{number}.patch").write_text(redacted(patch), errors="surrogateescape")
    write_json(starts / f"{number}.json", {"identity": record, **files})
    for name, content in files.items():
        write_json(folder / f"{name}.json", content)
    if number == 1:
        write_json(folder / "run.json", record)
    return number


@cache
def git_commit() -> str | None:
    """Commit of the code, with "+changes" where files differ from it; None outside a checkout."""
    try:
        commit = _git("rev-parse", "HEAD").strip()
        changed = _git("status", "--porcelain", "--untracked-files=no")
        return commit + ("+changes" if changed or _new_code() else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def git_changes() -> str:
    """What `git apply` takes to bring a checkout of `git_commit` to this code; empty without changes or checkout."""
    if not (git_commit() or "").endswith("+changes"):
        return ""
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "index"  # a copy, in which new files can be named without touching the checkout's
        shutil.copy(_git("rev-parse", "--path-format=absolute", "--git-path", "index").strip(), index)
        if _new_code():
            _git("add", "--intent-to-add", "--", *_new_code(), index=index)
        return _git("diff", "--binary", "HEAD", index=index)


def _new_code() -> list[str]:
    """Files that run but are not tracked."""
    return _git("ls-files", "--others", "--exclude-standard", "--", *CODE).splitlines()


def _git(*arguments: str, index: Path | None = None) -> str:
    """In the whole checkout, wherever this file lies in it."""
    here = Path(__file__).resolve().parents[1]
    environ = os.environ | ({} if index is None else {"GIT_INDEX_FILE": str(index)})
    command = ["git", "-c", "core.quotePath=false", *arguments]
    done = subprocess.run(command, cwd=here, env=environ, capture_output=True, check=True)
    return done.stdout.decode(errors="surrogateescape")  # of files in other encodings too
