"""A sweep: many runs of a recipe, each a process and a run of its own, and the report that compares them.

    python launch/sweep.py -m parallel=tp1_pp2,tp2_pp1 train.lr=1e-4,3e-4
    python launch/sweep.py --ranks 8 -m recipes/pretrain.py experiment=stdlib_tp2_pp2 train.lr=1e-4,3e-4,1e-3
    python launch/sweep.py --launch "launch/multinode.sh hosts" -m parallel=llama_8b_h100x32 train.lr=1e-4,3e-4
    python launch/sweep.py -m hydra/sweeper=optuna hydra.sweeper.n_trials=20 'train.lr=tag(log, interval(1e-4, 1e-2))'

Without a recipe it is recipes/pretrain.py. All jobs are checked before the first one starts. Runs are kept in runs/ID/;
the same command with --id ID leaves out what is finished and goes on with the rest. Ctrl-C once: the jobs that run save
and no other starts, code 75; twice: at once. DRY_RUN=1 prints the commands and stops. Exit code: 0 if all jobs
finished, 2 for a bad configuration, else that of the first one that failed. See docs/sweeps.md.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from conf import interrupts

    interrupts.while_imports_run()

from conf.cli import refuse, world
from conf.load import ConfigError
from conf.search import RESULTS, Objectives, is_search, search
from conf.sweeps import fixed_config
from launch.sweep_jobs import SweepJob, jobs_of, named, refuse_reserved
from launch.sweep_pool import Ended, Pool, Task
from launch.sweep_record import Record
from launch.sweep_report import STOPPED, comparison, last_value, line_of, table
from launch.sweep_request import Request, limits_of, parse, task_of, tasks_of

EXIT_CONFIG = 2


class Stopped(Exception):
    """On request; in a dry run, where all that can be known is printed."""


def main(argv: Sequence[str]) -> int:
    try:
        if world()[1] > 1:
            raise ConfigError(["a sweep starts launchers itself; run it once, not on every rank"])
        request = parse(argv, about=__doc__ or "")
        refuse_reserved(request.overrides)
        if os.environ.get("DRY_RUN", "0") == "1":
            return dry_run(request)
        return searched(request) if is_search(request.overrides) else listed(request)
    except ConfigError as error:
        return refuse(error.problems)
    except BrokenPipeError:  # whoever read our output went (| head): the jobs that ran have saved
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return STOPPED


def listed(request: Request) -> int:
    """Every combination of the overrides' sweeps."""
    tasks = tasks_of(request, jobs_of(request.overrides, request.sweep, config_dir=request.config_dir))
    sweep = Sweep(request, tasks[0].folder.parent)
    sweep.run(tasks)
    return sweep.end()


def searched(request: Request) -> int:
    """Jobs that a sweeper draws. One that cannot be planned is a failed one, as it is not known before."""
    config, keys = fixed_config(request.overrides, config_dir=request.config_dir)
    sweep = Sweep(request, Path(config.run.dir).expanduser().absolute() / request.sweep)

    def launch(batch: Sequence[Sequence[str]], first: int) -> list[Objectives]:
        jobs = drawn(request, batch, first, keys)
        sweep.run_drawn(jobs)
        return [sweep.objectives(job) for job in jobs]

    at_once = request.batch(request.ranks or config.parallel.tp * config.parallel.pp)
    with contextlib.suppress(Stopped):
        search(
            request.overrides, launch, seed=request.sweep, at_once=at_once, folder=sweep.folder,
            config_dir=request.config_dir,
        )  # fmt: skip
        results = sweep.folder / RESULTS
        print(f"\n{results}\n{results.read_text()}" if results.exists() else "\nno job reached an objective")
    return sweep.end()


def drawn(request: Request, batch: Sequence[Sequence[str]], first: int, keys: set[str]) -> list[SweepJob]:
    return [
        named(words, [word for word in words if word.partition("=")[0] in keys], sweep=request.sweep, number=number)
        for number, words in enumerate(batch, start=first)
    ]


def dry_run(request: Request) -> int:
    """Print the commands; of a search those of its first batch, as the others follow from what these reach."""
    limits_of(request)
    if not is_search(request.overrides):
        tasks = tasks_of(request, jobs_of(request.overrides, request.sweep, config_dir=request.config_dir))
        print(*(shlex.join(task.command) for task in tasks), sep="\n")
        print(shlex.join(comparison([task.folder for task in tasks])))
        return 0

    _, keys = fixed_config(request.overrides, config_dir=request.config_dir)

    def launch(batch: Sequence[Sequence[str]], first: int) -> list[Objectives]:
        tasks = tasks_of(request, drawn(request, batch, first, keys))
        print(*(shlex.join(task.command) for task in tasks), sep="\n")
        raise Stopped

    with contextlib.suppress(Stopped):
        search(request.overrides, launch, seed=request.sweep, at_once=1, folder=Path(), config_dir=request.config_dir)
    return 0


class Sweep:
    """The jobs of a sweep in its folder. failures: exit codes in the order in which they came."""

    def __init__(self, request: Request, folder: Path) -> None:
        self.request, self.folder = request, folder
        limits = limits_of(request)
        self.record = Record(folder)
        self.pool = Pool(limits, say=lambda line: print(line, flush=True))
        self.pool.listen()
        self.failures: list[int] = []
        self.refused: dict[str, str] = {}
        print(f"sweep    {request.sweep} in {folder}", flush=True)

    def run(self, tasks: Sequence[Task]) -> None:
        """What of them is not finished yet."""
        self.record.take([task.job for task in tasks])
        done = [task for task in tasks if self.record.is_finished(task.job)]
        print(*(f"{task.job.run_id} is finished already\n" for task in done), sep="", end="", flush=True)
        self.pool.run([task for task in tasks if task not in done], self._ended)

    def run_drawn(self, jobs: Sequence[SweepJob]) -> None:
        """Raises Stopped where that was asked for."""
        self.record.take(jobs)
        tasks = []
        for job in jobs:
            try:
                tasks.append(task_of(self.request, job))
            except ConfigError as error:
                self.refused[job.run_id] = "; ".join(error.problems)
                print(f"{job.run_id} ({' '.join(job.swept)}) refused: {self.refused[job.run_id]}", flush=True)
                self.failures.append(EXIT_CONFIG)
                self.record.end(job, EXIT_CONFIG, 0.0)
        self.run(tasks)
        if self.pool.requests:
            raise Stopped

    def objectives(self, job: SweepJob) -> Objectives:
        """What a job of a search reached, or why that is nothing."""
        code = self.record.jobs[job.run_id]["code"]
        if code != 0:
            return self.refused.get(job.run_id, f"{job.run_id} ended with code {code}")
        found = []
        for metric in self.request.objectives:
            value = last_value(self.folder / job.run_id, metric)
            if value is None:
                print(f"{job.run_id} has no {metric} that is a number; --objective names another", flush=True)
                return f"{job.run_id} has no {metric}"
            found.append(value)
        return found

    def _ended(self, ended: Ended) -> None:
        self.record.end(ended.task.job, ended.code, ended.seconds)
        self.failures += [ended.code] * (ended.code != 0)
        print(line_of(ended), flush=True)

    def end(self) -> int:
        """Table and comparison; the exit code."""
        jobs = self.record.jobs
        print(f"\n{table([(run, one['code'], one.get('seconds'), one['swept']) for run, one in jobs.items()])}\n")
        left = [run for run, one in jobs.items() if one["code"] != 0]
        if self.pool.requests:
            print(f"stopped on request; the same command with --id {self.request.sweep} goes on", flush=True)
            return self._stop_code() if left else 0
        self.record.close()
        begun = [self.folder / run for run in jobs if (self.folder / run / "run.json").exists()]
        compared = True
        if begun:  # the others are in the table alone
            command = comparison(begun)
            print(shlex.join(command), flush=True)
            compared = subprocess.run(command, check=False).returncode == 0
        return self.failures[0] if self.failures else int(not compared)

    def _stop_code(self) -> int:
        requests = self.pool.requests
        return STOPPED if len(requests) == 1 else 130 if requests[0] is signal.SIGINT else 143


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
