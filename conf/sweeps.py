"""What a command line with sweeps stands for: `parallel=tp1_pp2,tp2_pp1 train.lr=1e-4,3e-4` -> four command lines.

Hydra's grammar reads the overrides and the rules are its basic sweeper's: what is a sweep (choices, ranges, globs; not
the list [a,b]), the order of the jobs (the last sweep varies fastest), and that the later of two overrides of one key
counts. And whether a job can run on this machine. Not here: what it is called (launch/sweep_jobs.py), how it is run.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from conf import overrides as checks
from conf.cli import compose_config, folders_of, require_plan
from conf.knobs import options
from conf.load import ConfigError, range_problems
from conf.model_folders import names_folders
from conf.ranks import choose
from conf.schema import Config
from parallel.hardware import device_count, device_kind

MOST_JOBS = 10_000  # each is composed and checked before the first starts


def expand(overrides: Sequence[str], *, config_dir: str | None = None) -> list[tuple[str, ...]]:
    """Each job's overrides, in Hydra's order. Raises ConfigError. config_dir: a folder of more YAML groups.

    shuffle(...) draws the same order every time, so that a sweep that goes on has the jobs that it had.
    """
    offered = options(folders_of(config_dir))
    _require_readable(overrides, offered)
    parser = OverridesParser.create()
    choices: dict[str, list[str]] = {}
    state = random.getstate()
    random.seed(0)
    for text in overrides:
        override = parser.parse_override(text)
        key = override.get_key_element()
        if override.is_sweep_override():
            choices[key] = [f"{key}={value}" for value in _values(override, text, offered.get(key, []))]
        else:
            choices[key] = [text]
    random.setstate(state)
    if (jobs := math.prod(map(len, choices.values()))) > MOST_JOBS:
        raise ConfigError([f"{jobs:,} jobs are more than the {MOST_JOBS:,} that a sweep may have; name fewer values"])
    return list(itertools.product(*choices.values()))


def _require_readable(overrides: Sequence[str], offered: Mapping[str, Sequence[str]]) -> None:
    """ConfigError with every override that cannot be; folders of models are for each job's composition to judge."""
    problems = checks.problems([text for text in overrides if not names_folders(text)], options=offered)
    if problems:
        raise ConfigError(problems)


def _values(override: Override, text: str, offered: Sequence[str]) -> list[str]:
    """Of one sweep. offered: the options of its group, for a glob."""
    if not override.is_discrete_sweep():
        raise ConfigError(
            [f"{text}: an interval has no list of values; write choices, range(FROM,TO,STEP), or hydra/sweeper=optuna"]
        )  # fmt: skip
    value = override.value()
    try:
        found = value.filter(list(offered)) if isinstance(value, Glob) else _listed(override)
    except (ValueError, HydraException) as error:  # a range's step of 0
        raise ConfigError([f"{text}: {error}"]) from None
    if not found:
        raise ConfigError([f"{text} has no value: no job would run; give at least one"])
    return found


def _listed(override: Override) -> list[str]:
    if override.is_range_sweep() and (size := _size(override.value())) > MOST_JOBS:
        raise ValueError(f"{size:,} values are more than the {MOST_JOBS:,} jobs that a sweep may have")
    return list(override.sweep_string_iterator())


def _size(values: Any) -> int:
    """Of a range(FROM, TO, STEP)."""
    return max(0, math.ceil((values.stop - values.start) / values.step)) if values.step else 0


def fixed_config(overrides: Sequence[str], *, config_dir: str | None = None) -> tuple[Config, set[str]]:
    """What the overrides say that are no sweep of any kind, and the keys of those that are. Raises ConfigError."""
    _require_readable(overrides, options(folders_of(config_dir)))
    parsed = [OverridesParser.create().parse_override(text) for text in overrides]
    fixed = [
        text for text, one in zip(overrides, parsed, strict=True)
        if not one.is_sweep_override() and not one.key_or_group.startswith(("hydra.", "hydra/"))
    ]  # fmt: skip
    config = compose_config(fixed, config_dir=config_dir)
    if problems := range_problems(config):
        raise ConfigError(problems)
    return config, {one.get_key_element() for one in parsed if one.is_sweep_override()}


@dataclass(frozen=True)
class Placed:
    """A job that can run: its config, its ranks (None: the launcher's hosts say), and overrides to add (a smaller plan
    on few GPUs)."""

    config: Config
    ranks: int | None
    added: tuple[str, ...] = ()


def place(
    overrides: Sequence[str], *, ranks: int | None, packed: bool, here: bool = True, config_dir: str | None = None
) -> Placed:
    """The job on the ranks that it gets. Raises ConfigError with every problem.

    ranks: or None for what its plan needs. packed: beside others, so that it takes no more than that. here: on this
    machine.
    """
    config = compose_config(overrides, config_dir=config_dir)
    if not here:
        problems = range_problems(config)
        if problems:
            raise ConfigError(problems)
        return Placed(config, None)
    device, added = device_kind(), list[str]()
    if ranks is None and (packed or device == "cpu"):
        ranks = config.parallel.tp * config.parallel.pp
    elif ranks is None:
        ranks, added = choose(overrides, device=device, devices=device_count(), config_dir=config_dir)
        config = compose_config([*overrides, *added], config_dir=config_dir) if added else config
    require_plan(config, world_size=ranks, device=device)
    return Placed(config, ranks, tuple(added))


def devices_here() -> list[str] | None:
    """The GPUs that jobs may be given, as CUDA_VISIBLE_DEVICES names them; None on a CPU."""
    if device_kind() == "cpu":
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(number) for number in range(device_count())]
