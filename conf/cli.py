"""The command line of every recipe: Hydra's, made fit for launchers that start many ranks.

    if __name__ == "__main__":
        main(run)                      # run(config: Config, plan: ParallelPlan) -> int | None

Config and plan are checked here, before `run` imports torch, so that a fault ends in a second, with all its lines
printed once by rank 0 and exit code 2. Hydra composes; it makes no folders, changes no directory, sets up no logging.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NoReturn

import hydra
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from conf import interrupts, overrides
from conf.help import page
from conf.interrupts import EXIT_INTERRUPTED
from conf.knobs import CONF, options
from conf.load import ConfigError, range_problems, typed
from conf.model_folders import expanded
from conf.profile_windows import profile_problems
from conf.schema import Config
from conf.weight_sources import with_source
from parallel import placement, rules
from parallel.forward_only import forward_only
from parallel.hardware import device_kind
from parallel.plan import ParallelPlan

Entry = Callable[[Config, ParallelPlan], int | None]
EXIT_CONFIG = 2
NO_SOURCE = "initialize_from has no value; name the weights: a run, a checkpoint, an imported folder, or transformers'"


def main(entry: Entry, *, ranks: Callable[[Config], int] | None = None, trains: bool = True) -> None:
    """Run the recipe on this rank and exit with its code (None is 0); 2 for a bad config, 130 for Ctrl-C.

    ranks: how many the plan is for, where they are not those that run now. trains: False for a recipe that runs the
    weights of `initialize_from`, whose model then is the default (`conf.weight_sources`, `parallel.forward_only`).
    """

    def planned(config: Config, world_size: int) -> int:
        world_size = world_size if ranks is None else ranks(config)
        device = device_kind()
        if not trains:
            if not config.initialize_from:
                raise ConfigError([NO_SOURCE])
            config = forward_only(config, world_size=world_size)
        require_plan(config, world_size=world_size, device=device)
        share_cores(device)
        plan = ParallelPlan.from_config(config, world_size, device=device)
        return entry(config, replace(plan, warnings=(*plan.warnings, *placement.warnings(config, plan)))) or 0

    _run(planned, spelled_out if trains else lambda words: spelled_out(with_source(words, device=device_kind)))


def require_plan(config: Config, *, world_size: int, device: str | None) -> None:
    """ConfigError with every problem of the config on so many ranks. device: None where it is not this machine's."""
    problems = [*range_problems(config), *rules.problems(config, world_size=world_size, device=device)]
    problems += profile_problems(config, world_size=world_size)
    if problems:
        raise ConfigError(problems)


def main_without_plan(entry: Callable[[Config], int | None]) -> None:
    """The same for a recipe that looks for a plan itself: only the ranges of numbers are checked."""

    def unplanned(config: Config, world_size: int) -> int:
        if problems := range_problems(config):
            raise ConfigError(problems)
        return 0 if world()[0] > 0 else entry(config) or 0  # started on many ranks, one of them answers

    _run(unplanned, spelled_out)


def _run(task: Callable[[Config, int], int], expand: Callable[[Sequence[str]], list[str]]) -> NoReturn:
    interrupts.as_usual()
    argv = without_launcher_arguments(sys.argv[1:])
    sys.argv[1:] = argv
    try:
        code = _main(task, argv, expand)
    except ConfigError as error:
        code = refuse(error.problems)
    except KeyboardInterrupt:
        interrupts.tell()
        code = EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read our output has what it wanted (| head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    marker = os.environ.get("LAUNCH_MARKER")
    if marker is not None and code == 0 and os.environ.get("RANK", "0") == "0":
        Path(marker).touch()  # launch/local.sh judges by it
    sys.exit(code)


def without_launcher_arguments(argv: Sequence[str]) -> list[str]:
    """Drop --local_rank=N, --local-rank=N and --local_rank N, which launchers append: the rank is in LOCAL_RANK."""
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        if word in ("--local_rank", "--local-rank"):
            next(words, None)
        elif not word.startswith(("--local_rank=", "--local-rank=")):
            kept.append(word)
    return kept


def world() -> tuple[int, int]:
    """(rank, world size) as the launcher says in RANK and WORLD_SIZE; one rank without them."""
    _refuse_many_alone()
    found = []
    for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")):
        text = os.environ.get(name, default)
        if not text.isdecimal():
            raise ConfigError([f"{name}={text!r} is not a number; start through deepspeed or torchrun, or unset it"])
        found.append(int(text))
    rank, size = found
    if rank >= size:
        raise ConfigError([f"RANK={rank} is not below WORLD_SIZE={size}; ranks are 0 to {size - 1}"])
    return rank, size


def _refuse_many_alone() -> None:
    """srun and mpirun say their tasks in words of their own: each would train the whole run alone, or, where each is a
    launcher, start all ranks of it. A task that is a rank itself has the same number as one.
    """
    given = os.environ
    several = {
        "srun": int(given.get("SLURM_STEP_NUM_TASKS", "1")) > int(given.get("SLURM_STEP_NUM_NODES", "1")),
        "mpirun": given.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1") != "1",
    }
    for launcher, rank, size in (
        ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ):
        mine, theirs = (given.get("RANK"), given.get("WORLD_SIZE")), (given.get(rank), given.get(size))
        if several[launcher] and None not in mine and mine != theirs:
            raise ConfigError([
                f"{launcher} started {theirs[1]} tasks, several on a host, and each started ranks of its own; start "
                "one launcher a host, or launch/slurm.sbatch, which takes either"
            ])  # fmt: skip
    for name, launcher in (("SLURM_STEP_NUM_TASKS", "srun"), ("OMPI_COMM_WORLD_SIZE", "mpirun")):
        if os.environ.get(name, "1") != "1" and "RANK" not in os.environ:
            raise ConfigError([
                f"{launcher} started {os.environ[name]} tasks ({name}) without RANK and WORLD_SIZE, which would train "
                "a run each; start through launch/slurm.sbatch or launch/multinode.sh --launcher openmpi"
            ])  # fmt: skip


def require_own_store() -> None:
    """Under torchrun with restarts. The store that its agent shares with the ranks is kept over a restart, and with it
    the addresses of the dead ones (torch 2.13; pytorch/pytorch#135712).
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise ConfigError(
            [f"torchrun --max-restarts {restarts}: restarted ranks would look for each other where they were before; "
             "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, on every host"]
        )  # fmt: skip


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """prompt=TEXT and model=FOLDER as the knobs that they stand for. Raises ConfigError."""
    return expanded(overrides.with_prompts(arguments))


def compose_config(arguments: Sequence[str], *, config_dir: str | None = None) -> Config:
    """Overrides -> typed Config, numbers not yet checked. config_dir: a folder of more YAML groups. Raises ConfigError
    with every problem."""
    arguments = spelled_out(arguments)
    folders = folders_of(config_dir)
    problems = overrides.problems(arguments, options=options(folders))
    if problems:
        raise ConfigError(problems)
    register()
    extra = [] if config_dir is None else [f"hydra.searchpath=[file://{folders[-1]}]"]
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return typed(compose("config", [*extra, *overrides.opened(arguments)]))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError([overrides.explain(error)]) from None


@cache
def register() -> None:
    """Tell Hydra the schema that config.yaml builds on."""
    ConfigStore.instance().store("config_schema", Config)


def _main(task: Callable[[Config, int], int], argv: Sequence[str], expand: Callable[[Sequence[str]], list[str]]) -> int:
    rank, world_size = world()
    require_own_store()
    argv = expand(argv)
    flags = parse_flags(argv)
    sys.argv[1:] = [word for word in argv if word not in flags.overrides] + flags.overrides  # as Hydra wants them
    asks = flags.help or flags.hydra_help or flags.cfg or flags.info or flags.shell_completion
    if asks and rank > 0:
        return 0
    if flags.help:
        print(page(os.path.relpath(sys.argv[0])), end="")
        return 0
    if flags.hydra_help or flags.shell_completion:
        return _hydra(lambda cfg: None)
    if flags.multirun and world_size > 1:
        raise ConfigError(
            [f"-m would run every job inside each of {world_size} ranks; start one launcher a job instead"]
        )
    if flags.multirun or asks:
        problems = overrides.problems(flags.overrides, options=options(folders_of(flags.config_dir)))
        if problems:
            raise ConfigError(problems)
        return _sweep() if flags.multirun else _hydra(lambda cfg: None)
    return task(compose_config(flags.overrides, config_dir=flags.config_dir), world_size)


def share_cores(device: str) -> None:
    """On a CPU: tell DeepSpeed so, and give each of several ranks its part of the cores, before torch is imported.

    OpenMP's threads would spin while they wait for each other; where another process wants the core, that makes a step
    many times slower. Waiting passively costs little on an idle machine. What the environment says already stays.
    LOCAL_WORLD_SIZE is torchrun's name, LOCAL_SIZE DeepSpeed's.
    """
    if device != "cpu":
        return
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    if ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))


def folders_of(config_dir: str | None) -> list[Path]:
    return [CONF] if config_dir is None else [CONF, Path(config_dir).resolve()]


def parse_flags(argv: Sequence[str]) -> Namespace:
    """Hydra's own arguments; ConfigError for a flag that it does not have, and for two that it takes one of."""
    parser = get_args_parser()

    def error(message: str) -> NoReturn:
        raise ConfigError([f"{message}; see --help"])

    parser.error = error  # type: ignore[method-assign]
    flags = parser.parse_intermixed_args(argv)  # flags may stand between overrides
    given = [f"--{one}" for one in ("run", "multirun", "cfg", "info", "shell_completion") if getattr(flags, one)]
    if len(given) > 1:
        error(f"{' and '.join(given).replace('_', '-')} exclude each other; give one of them")
    return flags


def _hydra(task: Callable[[DictConfig], None]) -> int:
    """Let Hydra itself serve the command line."""
    register()
    sys.argv[1:] = overrides.opened(sys.argv[1:])
    hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)()
    return 0


def _sweep() -> int:
    """-m: each job in a process of its own, one after the other, so that no state passes on; the worst exit code."""
    codes: list[int] = []

    def job(cfg: DictConfig) -> None:
        command = [sys.executable, sys.argv[0], *HydraConfig.get().overrides.task]
        print(f"job {len(codes)}: {shlex.join(command)}", flush=True)
        codes.append(subprocess.run(command, check=False).returncode)

    _hydra(job)
    failed = sum(code != 0 for code in codes)
    print(f"{len(codes) - failed} of {len(codes)} jobs succeeded")
    return max((abs(code) for code in codes), default=0)


def refuse(problems: Sequence[str]) -> int:
    """Print on rank 0. The other ranks wait for it: a launcher ends all ranks when the first one leaves."""
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    outside = not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size))  # no rank 0 may ever see this
    if outside or rank == "0":
        print("\n".join(f"error: {line}" for line in problems), file=sys.stderr, flush=True)
    else:
        time.sleep(5)
    return EXIT_CONFIG
