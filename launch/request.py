"""What the launchers that take a hostfile are asked to run: their common command line, checked.

    LAUNCHER HOSTFILE [-i INCLUDE] [-e EXCLUDE] [-p SSH_PORT] [--interface NAME] [more] RECIPE OVERRIDES...

Not here: a launcher's own options beyond their spelling (multinode.py, node.py, preflight.py).
"""

from __future__ import annotations

import getopt
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conf import hostfile
from conf.cli import compose_config, parse_flags
from conf.load import ConfigError, range_problems
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
    given = {SHORT.get(name, name.lstrip("-")): value for name, value in [*before, *after]}
    port = given.pop("ssh_port", None)
    if port is not None and not (port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError([f"-p {port} is not a port; give 1 to 65535"])
    overrides = list(words[1:])
    if not any(word.startswith("resume=") for word in overrides):
        overrides.append("resume=auto")
    return Request(
        Path(rest[0]).absolute(), given.pop("include", ""), given.pop("exclude", ""), port,
        given.pop("interface", None), find_recipe(words[0]), tuple(overrides), given,
    )  # fmt: skip


def find_recipe(name: str) -> Path:
    """Relative to the folder of the call, else to this repository's. Raises ConfigError."""
    recipe = Path(name) if Path(name).is_file() else ROOT / name
    if not recipe.is_file():
        raise ConfigError([f"there is no recipe {name}; see recipes/"])
    return recipe.absolute()


def choose_hosts(request: Request) -> hostfile.Slots:
    """What the hostfile and the filters give."""
    return hostfile.chosen(hostfile.read(request.hostfile), include=request.include, exclude=request.exclude)


def composed(overrides: Sequence[str]) -> Config:
    """The configuration of these words, every knob within its range. Raises ConfigError."""
    flags = parse_flags(overrides)
    config = compose_config(flags.overrides, config_dir=flags.config_dir)
    problems = range_problems(config)
    if problems:
        raise ConfigError(problems)
    return config


def require_plan(config: Config, hosts: hostfile.Slots) -> None:
    """ConfigError where the configured plan cannot use these slots."""
    problem = hostfile.plan_problem(hosts, tp=config.parallel.tp, pp=config.parallel.pp)
    if problem is not None:
        raise ConfigError([problem])


def check_given() -> None:
    """MASTER_ADDR and MASTER_PORT, where the caller's environment has them."""
    if os.environ.get("MASTER_ADDR") == "":
        raise ConfigError(["MASTER_ADDR is empty; give an address of the first host, or unset it"])
    port = os.environ.get("MASTER_PORT", "0")
    if not (port.isdigit() and int(port) < 65536):
        raise ConfigError([f"MASTER_PORT={port} is not a port; give 1 to 65535, or unset it"])
