"""What the launchers that take a hostfile are asked to run: their common command line, checked.

    LAUNCHER HOSTFILE [-i INCLUDE] [-e EXCLUDE] [-p SSH_PORT] [--interface NAME] [more] RECIPE OVERRIDES...

Not here: a launcher's own options beyond their spelling (multinode.py, node.py, preflight.py).
"""

from __future__ import annotations

import getopt
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conf import hostfile, ranks
from conf.cli import parse_flags
from conf.load import ConfigError
from conf.schema import Config
from launch.remote import ROOT

SHORT = {"-i": "include", "-e": "exclude", "-p": "ssh_port"}


@dataclass(frozen=True)
class Request:
    """more: the launcher's own options that were given, by name without dashes."""

    hostfile: Path
    include: str
    exclude: str
    ssh_port: str | None
    interface: str | None
    recipe: Path
    overrides: tuple[str, ...]
    more: Mapping[str, str] = field(default_factory=dict)


def parse(argv: Sequence[str], *, usage: str, short: str = "", more: Sequence[str] = ()) -> Request:
    """Options may stand before and after HOSTFILE; all behind RECIPE is the recipe's. short, more: as getopt takes
    them, beside the common ones. Raises ConfigError.
    """
    letters, names = f"i:e:p:{short}", ["include=", "exclude=", "ssh_port=", "interface=", *more]
    try:
        before, rest = getopt.getopt(argv, letters, names)
        after, words = getopt.getopt(rest[1:], letters, names)
    except getopt.GetoptError as error:
        raise ConfigError([f"{error}; {usage}"]) from None
    if not words:
        raise ConfigError([usage])
    given: dict[str, str] = {}
    for option, value in [*before, *after]:
        name = SHORT.get(option, option.lstrip("-"))
        if given.setdefault(name, value) != value:
            raise ConfigError([f"--{name} is given twice: {given[name]} and {value}; give it once"])
    for name in ("include", "exclude", "interface"):
        if given.get(name) == "":  # as of an unset variable, which did not mean all hosts, or any network
            raise ConfigError([f"--{name} is empty; give it a value, or leave it out"])
    port = given.pop("ssh_port", None)
    if port is not None and not (port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError([f"-p {port} is not a port; give 1 to 65535"])
    overrides = list(words[1:])
    if not any(word.startswith("resume=") for word in overrides):
        overrides.append("resume=auto")
    return Request(
        Path(rest[0]).absolute(), given.pop("include", ""), given.pop("exclude", ""), port,
        given.pop("interface", None), find_recipe(words[0]), tuple(overrides), given,
    )  # fmt: skip


def split(option: str, text: str) -> tuple[str, ...]:
    """The words of an option's value, as a shell splits them. Raises ConfigError."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError([f"{option} {text}: {error}; close its quotes"]) from None


def find_recipe(name: str) -> Path:
    """Relative to the folder of the call, else to this repository's. Raises ConfigError."""
    recipe = Path(name) if Path(name).is_file() else ROOT / name
    if not recipe.is_file():
        raise ConfigError([f"there is no recipe {name}; see recipes/"])
    return recipe.absolute()


def choose_hosts(request: Request) -> hostfile.Slots:
    """What the hostfile and the filters give."""
    return hostfile.chosen(hostfile.read(request.hostfile), include=request.include, exclude=request.exclude)


def enough_hosts(request: Request) -> tuple[hostfile.Slots, int]:
    """What the hostfile and the filters give, and how many of them a run takes (--hosts). Raises ConfigError."""
    hosts, count = choose_hosts(request), request.more.get("hosts")
    if count is None:
        return hosts, len(hosts)
    if not (count.isdecimal() and int(count) > 0):
        raise ConfigError([f"--hosts {count} is not a number of hosts; give 1 or more"])
    if int(count) > len(hosts):
        raise ConfigError([f"--hosts {count} but there are {len(hosts)} ({', '.join(hosts)}); give at most that"])
    return hosts, int(count)


def composed(recipe: Path, words: Sequence[str], *, config_dir: str | None = None) -> Config:
    """The configuration of these words, every knob within its range. Raises ConfigError."""
    flags = parse_flags(words)
    return ranks.composed(recipe.name, flags.overrides, config_dir=flags.config_dir or config_dir)


def require_plan(recipe: Path, config: Config, hosts: hostfile.Slots) -> None:
    """ConfigError where the configured plan cannot use these slots."""
    problem = hostfile.plan_problem(hosts, tp=config.parallel.tp, pp=config.parallel.pp)
    if problem is not None:
        raise ConfigError([problem])
    ranks.require_plan(recipe.name, config, world_size=hostfile.ranks(hosts), device=None)


def check_given() -> None:
    """MASTER_ADDR and MASTER_PORT, where the caller's environment has them."""
    if os.environ.get("MASTER_ADDR") == "":
        raise ConfigError(["MASTER_ADDR is empty; give an address of the first host, or unset it"])
    port = os.environ.get("MASTER_PORT")
    if port is not None and not (port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError([f"MASTER_PORT={port} is not a port; give 1 to 65535, or unset it"])


def check_started_once() -> None:
    """By srun or mpirun, as each task would start the ranks of all hosts. Raises ConfigError."""
    for launcher, name in (("srun", "SLURM_STEP_NUM_TASKS"), ("mpirun", "OMPI_COMM_WORLD_SIZE")):
        tasks = os.environ.get(name, "1")
        if tasks != "1":
            raise ConfigError([
                f"{launcher} started {tasks} tasks ({name}) and each would start the ranks of all hosts; start one "
                "launcher, or submit launch/slurm.sbatch"
            ])  # fmt: skip
