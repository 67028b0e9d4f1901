"""What launch/elastic.py is asked to run, torchrun's options and a recipe behind them, checked before the hosts meet.

Each host checks alike, so that all of them refuse in a line: a rank that refuses on one host would leave the others
with a store that is gone. Not here: programs that are no recipe of this repository, whose words are their own.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from conf.cli import parse_flags, without_launcher_arguments
from conf.load import ConfigError
from conf.ranks import FORWARD_ONLY, TRAINING, require_plan
from launch.remote import ROOT
from launch.request import composed, find_recipe
from parallel.hardware import device_kind

CHECKED = (*TRAINING, *FORWARD_ONLY, "probe.py")  # those that run on the ranks of several hosts


def with_recipe(argv: Sequence[str], asked: Namespace) -> list[str]:
    """argv with a recipe that is not in the folder of the call as this repository's. asked: as torchrun's parse_args
    gives argv. Raises ConfigError where there is none.
    """
    at = len(argv) - len(asked.training_script_args) - 1
    if asked.module or asked.no_python or Path(asked.training_script).is_file():
        return list(argv)
    return [*argv[:at], str(find_recipe(asked.training_script)), *argv[at + 1 :]]


def check(asked: Namespace) -> None:
    """asked: as torchrun's parse_args gives it, PET_* variables too. Raises ConfigError."""
    size, recipe = world_size(asked), Path(asked.training_script)
    if asked.module or asked.no_python:
        return
    if recipe.name not in CHECKED or recipe.resolve().parent != ROOT / "recipes":
        return
    words = without_launcher_arguments(asked.training_script_args)
    flags = parse_flags(words)
    if flags.multirun and size != 1:
        raise ConfigError(["-m would run every job inside each of the ranks; start one launcher a job instead"])
    if flags.help or flags.hydra_help or flags.cfg or flags.info or flags.shell_completion or flags.multirun:
        return  # which start no run of these words
    config = composed(recipe, words)
    if size is not None:
        require_plan(recipe.name, config, world_size=size, device=device_kind())


def world_size(asked: Namespace) -> int | None:
    """How many ranks run on all hosts; None where that is known when they meet: a range of hosts, or as many ranks on
    each of them as it has devices. Raises ConfigError.
    """
    from torch.distributed.run import determine_local_world_size

    fewest, most = nodes(asked)
    each = str(asked.nproc_per_node)
    try:
        here = determine_local_world_size(each)
    except ValueError as error:
        raise ConfigError(
            [f"--nproc-per-node {each}: {str(error).rstrip('.')}; give a number of ranks, gpu or cpu"]
        ) from None
    if here < 1:
        raise ConfigError([f"--nproc-per-node {each} starts no rank; give 1 or more"])
    return most * here if fewest == most and (most == 1 or each.isdecimal()) else None


def nodes(asked: Namespace) -> tuple[int, int]:
    """The fewest and the most hosts that torchrun takes. Raises ConfigError."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", asked.nnodes, re.ASCII)
    fewest, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < fewest <= most:
        raise ConfigError([f"--nnodes {asked.nnodes} is no number of hosts; give 2, or MIN:MAX as 2:4"])
    return fewest, most


def command_of(asked: Namespace) -> list[str]:
    """What each rank runs, as torchrun puts it together."""
    python = [] if asked.no_python else [os.environ.get("PYTHON_EXEC", sys.executable), "-u"]
    module = ["-m"] if asked.module else []
    return [*python, *module, asked.training_script, *asked.training_script_args]
