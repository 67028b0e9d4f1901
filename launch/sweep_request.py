"""The command line of launch/sweep.py, and the jobs that it asks for as commands that can run here.

Not here: what a sweep is in Hydra's grammar (conf/sweeps.py), running the jobs (sweep_pool.py).
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from conf.load import ConfigError
from conf.sweeps import Placed, devices_here, place
from launch.remote import ROOT
from launch.sweep_jobs import SweepJob
from launch.sweep_pool import Limits, Task
from launch.sweep_record import new_sweep_id


@dataclass(frozen=True)
class Request:
    """ranks: of each job; at_once, total: how many jobs and ranks run at the same time, None where it was not said."""

    sweep: str
    recipe: str
    overrides: tuple[str, ...]
    launch: tuple[str, ...]
    ranks: int | None
    at_once: int | None
    total: int | None
    objectives: tuple[str, ...]
    config_dir: str | None

    @property
    def local(self) -> bool:
        """Whether jobs take ranks of this machine, which are counted; else the launcher knows where they go."""
        return Path(self.launch[0]).name == "local.sh"

    @property
    def packed(self) -> bool:
        return self.total is not None or (self.at_once or 1) > 1

    def batch(self, ranks: int) -> int:
        """How many jobs of so many ranks run at once."""
        fits = max(1, self.total // ranks) if self.total is not None else self.at_once or 1
        return fits if self.at_once is None else min(fits, self.at_once)


def parse(argv: Sequence[str], *, about: str) -> Request:
    """Raises ConfigError for what cannot be. about: of --help."""
    parser = _parser(about)
    asked = parser.parse_intermixed_args(argv)
    recipe, overrides = "recipes/pretrain.py", asked.words
    if overrides and overrides[0].endswith(".py"):
        recipe, *overrides = overrides
    launch = shlex.split(asked.launch)
    if not launch:
        raise ConfigError(["--launch is empty; name a launch script"])
    request = Request(
        asked.id or new_sweep_id(), _there(recipe, "recipe"), tuple(overrides),
        (_there(launch[0], "launch script"), *launch[1:]), asked.n, asked.at_once, asked.ranks,
        tuple(asked.objective.split(",")), asked.config_dir,
    )  # fmt: skip
    if not request.local and (request.ranks or request.total):
        raise ConfigError([f"-n and --ranks count for launch/local.sh; {launch[0]} knows its ranks (use --at-once)"])
    if request.local and any(word.startswith("-n") for word in launch[1:]):
        raise ConfigError([f"--launch {asked.launch!r}: -n belongs to launch/sweep.py itself"])
    return request


def _parser(about: str) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="launch/sweep.py", description=about, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False, usage="python launch/sweep.py [OPTIONS] -m [RECIPE] OVERRIDES...",
    )  # fmt: skip

    def error(message: str) -> NoReturn:
        raise ConfigError([f"{message}; see --help"])

    found.error = error  # type: ignore[method-assign]
    found.add_argument("-m", "--multirun", action="store_true", help="as Hydra has it; may be left out")
    found.add_argument("-n", type=_count, metavar="RANKS", help="ranks of each job (what its plan needs)")
    found.add_argument("--at-once", type=_count, metavar="JOBS", help="most jobs at the same time (1)")
    found.add_argument("--ranks", type=_count, metavar="RANKS", help="ranks in all: as many jobs at once as fit")
    found.add_argument("--launch", default="launch/local.sh", metavar="COMMAND", help="starts a job (%(default)s)")
    found.add_argument("--id", metavar="NAME", help="of the sweep; one that is there is gone on with")
    found.add_argument(
        "--objective", default="validation/loss", metavar="METRIC",
        help="of a search: its last value in metrics.jsonl (%(default)s); several separated by commas",
    )  # fmt: skip
    found.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder of more YAML groups")
    found.add_argument("words", nargs="*", metavar="[RECIPE] OVERRIDES", help="of Hydra, with its sweeps")
    return found


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number; give 1 or more")
    return int(text)


def _there(path: str, what: str) -> str:
    """As typed, or in this repository."""
    found = next((one for one in (Path(path), ROOT / path) if one.is_file()), None)
    if found is None:
        raise ConfigError([f"there is no {what} {path}"])
    return str(found.absolute())


def limits_of(request: Request) -> Limits:
    """What jobs share. Raises ConfigError where this machine has less."""
    if not request.packed:
        return Limits(jobs=1)
    if not request.local:
        return Limits(jobs=request.at_once)
    devices, total = devices_here(), request.total
    if devices is not None and total is not None and total > len(devices):
        raise ConfigError([f"--ranks {total} but this machine has {len(devices)} GPUs; give no more"])
    cores = len(os.sched_getaffinity(0)) if devices is None else None
    return Limits(request.at_once, total, None if devices is None else devices[:total], cores)


def tasks_of(request: Request, jobs: Sequence[SweepJob]) -> list[Task]:
    """The jobs as commands. Raises ConfigError with every problem of every job."""
    found, problems = [], dict[str, list[SweepJob]]()
    for job in jobs:
        try:
            found.append(task_of(request, job))
        except ConfigError as error:
            for line in error.problems:
                problems.setdefault(line, []).append(job)
    lines = []
    for line, those in problems.items():  # what is wrong with all of them is said once
        shown = [f"job {job.number:02d} ({' '.join(job.swept)}): " for job in those] if len(those) < len(jobs) else [""]
        lines += [f"{which}{line}" for which in shown]
    folders = {task.folder.parent for task in found}
    if len(folders) > 1:
        lines.append(f"run.dir: the jobs of a sweep are in one folder, not {len(folders)}; give one")
    if lines:
        raise ConfigError(lines)
    return found


def task_of(request: Request, job: SweepJob) -> Task:
    """Raises ConfigError with every problem of the job."""
    placed = place(
        job.overrides, ranks=request.ranks, packed=request.packed, config_dir=request.config_dir,
        here=request.local,
    )  # fmt: skip
    run = placed.config.run
    folder = Path(run.dir).expanduser().absolute() / request.sweep / job.run_id
    if request.total is not None and placed.ranks is not None and placed.ranks > request.total:
        raise ConfigError([f"it needs {placed.ranks} ranks but --ranks gives {request.total}"])
    return Task(job, _command(request, job, placed, begun=folder.exists()), folder, placed.ranks)


def _command(request: Request, job: SweepJob, placed: Placed, *, begun: bool) -> tuple[str, ...]:
    words = [*request.launch]
    words += ["-n", str(placed.ranks)] if placed.ranks is not None else []
    words += [request.recipe, *job.overrides, *placed.added]
    words += ["--config-dir", request.config_dir] if request.config_dir is not None else []
    # As launch/local.sh with its restarts: what was started goes on from its own checkpoint.
    return tuple("resume=auto" if begun and word.startswith("resume=") else word for word in words)
