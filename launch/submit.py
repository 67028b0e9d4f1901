"""Submit a recipe to Slurm after checking it here: one job, or a sweep as one array job.

    python launch/submit.py --sbatch "-N 2 --gpus-per-node=8 -t 4:00:00" recipes/pretrain.py parallel=tp4_pp2
    python launch/submit.py --sbatch "-N 1 --gpus-per-node=8" --array-limit 4 -m recipes/pretrain.py train.lr=1e-4,3e-4

Prints sbatch's command and the job's number; DRY_RUN=1 stops before. --sbatch: options of sbatch. With -m each job is a
run SWEEP-NN of the experiment SWEEP (--id; without it named by the clock), its overrides are in slurm-SWEEP.json here,
and at most --array-limit of them run at once; with the same --id those whose run is complete are left out. Exit code: 2
for a configuration that cannot run there, else sbatch's. Not here: what the job does (launch/slurm.sbatch).
"""

from __future__ import annotations

import argparse
import getopt
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from conf import interrupts

    interrupts.while_imports_run()

from conf.cli import parse_flags
from conf.load import OF_RECIPES, ConfigError, to_plain
from conf.ranks import require_plan
from conf.schema import Config
from launch.remote import ROOT
from launch.request import composed, find_recipe, split
from launch.slurm_layout import layout
from launch.sweep_jobs import SweepJob, jobs_of
from telemetry.redact import HIDDEN, redacted
from telemetry.run_folder import run_folder_path

USAGE = (
    'usage: python launch/submit.py [--sbatch "OPTIONS"] [--interface NAME] [-m [--id SWEEP] [--array-limit JOBS]] '
    "RECIPE OVERRIDES..."
)
MOST = 100_000  # hosts, tasks or GPUs
ASIDE = ("run", "resume", "telemetry.wandb.name", *OF_RECIPES)  # what may differ between two starts of one job
NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class Submission:
    """The command line. words: of the recipe, its flags too."""

    sbatch: tuple[str, ...]
    interface: tuple[str, ...]
    limit: str | None
    sweep: str | None
    recipe: Path
    words: tuple[str, ...]


def parse(argv: Sequence[str]) -> Submission:
    try:
        options, words = getopt.getopt(argv, "m", ["sbatch=", "interface=", "array-limit=", "id=", "multirun"])
    except getopt.GetoptError as error:
        raise ConfigError([f"{error}; {USAGE}"]) from None
    if not words:
        raise ConfigError([USAGE])
    given = dict(options)
    flags = parse_flags(words[1:])
    many = flags.multirun or "-m" in given or "--multirun" in given
    limit, sweep = given.get("--array-limit"), given.get("--id")
    if not many and (limit is not None or sweep is not None):
        raise ConfigError(["--id and --array-limit are for a sweep; add -m"])
    if limit is not None and not re.fullmatch(r"[1-9]\d*", limit):
        raise ConfigError([f"--array-limit {limit} is not a number of jobs; give 1 or more"])
    if sweep is not None and not NAME.fullmatch(sweep):
        raise ConfigError([f"--id {sweep} is no name of a folder; use letters, digits, '.', '_' and '-'"])
    if many and sweep is None:
        sweep = time.strftime("sweep-%Y%m%d-%H%M%S", time.gmtime())
    interface = ("--interface", given["--interface"]) if "--interface" in given else ()
    recipe = find_recipe(words[0])
    own = tuple(word for word in words[1:] if word not in ("-m", "--multirun"))
    return Submission(split("--sbatch", given.get("--sbatch", "")), interface, limit, sweep, recipe, own)


def asked(options: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """What of sbatch's options decides the ranks: hosts, without their names, and what Slurm would say on them."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for names in (
        ("-N", "--nodes"),
        ("-n", "--ntasks"),
        ("--ntasks-per-node",),
        ("-G", "--gpus"),
        ("--gpus-per-node",),
    ):
        parser.add_argument(*names)
    parser.add_argument("--gres")
    given = {name: number(value) for name, value in vars(parser.parse_known_args(options)[0]).items()}
    for name, value in given.items():
        if value is not None and value > MOST:
            raise ConfigError([f"--sbatch: --{name.replace('_', '-')} {value}: no cluster has so many"])
    nodes, tasks, per_node = given["nodes"] or 1, given["ntasks"], given["ntasks_per_node"]
    if per_node is None and tasks is not None and given["nodes"] is not None:
        per_node = -(-tasks // nodes)
    environ = {}
    if per_node is not None:
        environ = {"SLURM_NTASKS_PER_NODE": str(per_node), "SLURM_TASKS_PER_NODE": f"{per_node}(x{nodes})"}
    elif tasks is not None:  # on as many hosts as Slurm likes
        environ = {"SLURM_NTASKS": str(tasks), "SLURM_TASKS_PER_NODE": str(tasks)}
    gpus = given["gpus_per_node"] or given["gres"]
    if gpus is None and given["gpus"] is not None and (per_node is not None or tasks is None):
        gpus = given["gpus"] // nodes
    if gpus:
        environ["SLURM_GPUS_ON_NODE"] = str(gpus)
    return [f"host {one}" for one in range(nodes)], environ


def number(value: str | None) -> int | None:
    """Of `4`, `2-4` (the least), `a100:8` and `gpu:a100:8`; None where there is none."""
    if value is None:
        return None
    match = re.match(r"(?:gpu:)?(?:[A-Za-z][\w.-]*:)?(\d+)", value)
    return int(match[1]) if match else None


def checked(submission: Submission, overrides: Sequence[str], *, config_dir: str | None) -> Config:
    """The configuration of one job. Raises ConfigError where it cannot run as it is asked for."""
    config = composed(submission.recipe, overrides, config_dir=config_dir)
    hosts, environ = asked(submission.sbatch)
    found = layout(environ, hosts, config)
    device = "cuda" if "SLURM_GPUS_ON_NODE" in environ else None
    require_plan(submission.recipe.name, config, world_size=sum(found.ranks), device=device)
    return config


@dataclass(frozen=True)
class Sweep:
    """path: the file of its jobs' overrides. complete: the numbers of those whose run came to its end."""

    path: Path
    jobs: tuple[SweepJob, ...]
    complete: tuple[int, ...]

    @property
    def left(self) -> list[int]:
        return [job.number for job in self.jobs if job.number not in self.complete]

    @property
    def overrides(self) -> list[list[str]]:
        return [list(job.overrides) for job in self.jobs]


def sweep_of(submission: Submission, sweep: str) -> Sweep:
    """Raises ConfigError with every job's problems, and where this folder or a complete run is another sweep's."""
    flags = parse_flags(submission.words)
    jobs, problems, complete = jobs_of(flags.overrides, sweep, config_dir=flags.config_dir), [], []
    path, others = Path.cwd() / f"slurm-{sweep}.json", []
    for job in jobs:
        try:
            config = checked(submission, job.overrides, config_dir=flags.config_dir)
            folder = run_folder_path(config.run, job.run_id)
            if (folder / "complete.json").exists():
                complete.append(job.number)
                if not path.exists():  # which tells more exactly
                    others += [f"job {job.number}: {line}; choose another --id" for line in _other_run(folder, config)]
        except ConfigError as error:
            problems += [f"job {job.number} ({' '.join(job.swept)}): {line}" for line in error.problems]
    if problems:
        raise ConfigError(problems)
    if others:
        raise ConfigError(others[:1] if len(others) == 1 else [f"{others[0]} ({len(others)} such jobs)"])
    found = Sweep(path, tuple(jobs), tuple(complete))
    if found.path.exists() and json.loads(found.path.read_text()) != found.overrides:
        raise ConfigError([f"{found.path} holds another sweep; give this one another --id"])
    return found


def _other_run(folder: Path, config: Config) -> Iterator[str]:
    """A line where the finished run of a folder had another configuration than this. Raises ConfigError."""
    try:
        was = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            [f"{folder} is of a finished run, but its config.json: {error}; choose another --id"]
        ) from None
    found = list(_differing(was, redacted(to_plain(config)), ""))
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        yield f"the finished run {folder} is another: {', '.join(found[:3])}{more}"


def _differing(was: Any, now: Any, key: str) -> Iterator[str]:
    """`train.lr was 0.1 and is 0.2` of each knob that both versions of the code have; secrets are not compared."""
    if key in ASIDE:
        return
    if isinstance(was, dict) and isinstance(now, dict):
        for name in (name for name in was if name in now):
            yield from _differing(was[name], now[name], f"{key}.{name}".lstrip("."))
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for index, (one, other) in enumerate(zip(was, now, strict=True)):
            yield from _differing(one, other, f"{key}.{index}")
    elif was != now and HIDDEN not in f"{was} {now}":
        yield f"{key} was {was} and is {now}"


def command_of(submission: Submission, sweep: Sweep | None) -> list[str]:
    command = ["sbatch", "--parsable", *submission.sbatch]
    script = [str(ROOT / "launch" / "slurm.sbatch"), *submission.interface]
    if sweep is None:
        return [*command, *script, str(submission.recipe), *submission.words]
    config_dir = parse_flags(submission.words).config_dir
    more = [] if config_dir is None else ["--config-dir", config_dir]
    limit = "" if submission.limit is None else f"%{submission.limit}"
    script = [f"--array={ranges(sweep.left)}{limit}", *script, "--jobs", str(sweep.path)]
    return [*command, *script, str(submission.recipe), *more]


def ranges(numbers: Sequence[int]) -> str:
    """As --array takes them: 0, 3, 4 and 5 are `0,3-5`."""
    runs = [[one for _, one in group] for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def submit(submission: Submission) -> int:
    sweep = None
    if submission.sweep is None:
        flags = parse_flags(submission.words)
        checked(submission, flags.overrides, config_dir=flags.config_dir)
    else:
        sweep = sweep_of(submission, submission.sweep)
        print(*(f"{sweep.jobs[one].run_id} is finished already\n" for one in sweep.complete), sep="", end="")
        if not sweep.left:
            print(f"all {len(sweep.jobs)} jobs of {submission.sweep} are finished; nothing is submitted")
            return 0
    command = command_of(submission, sweep)
    print(shlex.join(command), flush=True)
    if sweep is not None:
        print(*(f"task {one}: {shlex.join(sweep.jobs[one].overrides)}\n" for one in sweep.left), sep="", end="")
    if os.environ.get("DRY_RUN", "0") == "1":
        return 0
    if shutil.which("sbatch") is None:
        raise ConfigError(["sbatch is not on the PATH; submit from a host that has Slurm's commands"])
    if sweep is not None:
        sweep.path.write_text(json.dumps(sweep.overrides, indent=1) + "\n")
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode == 0 or done.stdout:
        print(f"job {done.stdout.strip().partition(';')[0]}; see squeue, and slurm-JOB.out here")
    return done.returncode


def main() -> int:
    try:
        if sys.argv[1:] in (["-h"], ["--help"]):
            print(f"{__doc__}\n{USAGE}")
            return 0
        return submit(parse(sys.argv[1:]))
    except ConfigError as error:
        print("\n".join(f"launch/submit.py: {line}" for line in error.problems), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
