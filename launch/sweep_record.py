"""What a sweep keeps in its folder, so that the same command goes on with it: sweep.json, which jobs ended how.

One process has the folder at a time. A job is known by its number and the fingerprint of its command line; under other
overrides a number would be another job, and the sweep is refused. Not here: the runs themselves, which resume by their
own run.id.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from conf.load import ConfigError
from launch.sweep_jobs import SweepJob


def new_sweep_id() -> str:
    """UTC time and four random hex digits, as a run's id."""
    return time.strftime("sweep-%Y%m%d-%H%M%S", time.gmtime()) + "-" + secrets.token_hex(2)


class Record:
    """The jobs of a sweep by run id; each: number, swept words, fingerprint, exit code (None: it never ended)."""

    def __init__(self, folder: Path) -> None:
        """Take the folder. Raises ConfigError where another process has it, or it is a run's."""
        self.folder = folder
        if (folder / "run.json").exists():
            raise ConfigError([f"{folder} is a run's folder, not a sweep's; choose another --id"])
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = os.fdopen(os.open(folder / "sweep.lock", os.O_RDWR | os.O_CREAT, 0o644), "r+")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError([f"{folder} is in use by another sweep; wait for it or choose another --id"]) from None
        except OSError as error:
            raise ConfigError([f"{folder} cannot be written: {error.strerror}; choose another run.dir"]) from None
        self._path = folder / "sweep.json"
        self.jobs: dict[str, dict[str, Any]] = {}
        with suppress(FileNotFoundError):
            self.jobs = json.loads(self._path.read_text())["jobs"]

    def close(self) -> None:
        self._lock.close()

    def take(self, jobs: Sequence[SweepJob]) -> None:
        """Add jobs. Raises ConfigError where one of them is another than it was."""
        problems = []
        for job in jobs:
            known = self.jobs.get(job.run_id)
            if known is None:
                self.jobs[job.run_id] = {
                    "number": job.number, "swept": job.swept, "fingerprint": fingerprint(job), "code": None,
                }  # fmt: skip
            elif known["fingerprint"] != fingerprint(job):
                was, now = " ".join(known["swept"]), " ".join(job.swept)
                what = f"was {was} and is {now}" if was != now else "had other overrides"
                problems.append(f"{self.folder.name}: job {job.number:02d} {what}; choose another --id")
        if problems:
            raise ConfigError(problems[:1] if len(problems) == 1 else [f"{problems[0]} ({len(problems)} such jobs)"])
        self._write()

    def is_finished(self, job: SweepJob) -> bool:
        return self.jobs[job.run_id]["code"] == 0

    def end(self, job: SweepJob, code: int, seconds: float) -> None:
        self.jobs[job.run_id] |= {"code": code, "seconds": round(seconds, 1)}
        self._write()

    def _write(self) -> None:
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"id": self.folder.name, "jobs": self.jobs}, indent=2) + "\n")
        os.replace(temporary, self._path)


def fingerprint(job: SweepJob) -> str:
    """Of the overrides, in place of them, as one may hold a key; what changes no number is left out."""
    words = [word for word in job.overrides if not word.startswith(("resume=", "telemetry.wandb.name="))]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()
