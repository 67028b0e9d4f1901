"""What a command line with sweeps stands for: `parallel=tp1_pp2,tp2_pp1 train.lr=1e-4,3e-4` -> four command lines.

Hydra's grammar reads the overrides and the rules are its basic sweeper's: what is a sweep (choices, ranges, globs; not
the list [a,b]), the order of the jobs (the last sweep varies fastest), and that the later of two overrides of one key
counts. Not here: what a job is called (launch/sweep_jobs.py), how it is run (launch/).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from conf import overrides as checks
from conf.cli import folders_of
from conf.knobs import options
from conf.load import ConfigError


def expand(overrides: Sequence[str], *, config_dir: str | None = None) -> list[tuple[str, ...]]:
    """Each job's overrides, in Hydra's order. Raises ConfigError. config_dir: a folder of more YAML groups.

    shuffle(...) draws the same order every time, so that a sweep that goes on has the jobs that it had.
    """
    offered = options(folders_of(config_dir))
    problems = checks.problems(overrides, options=offered)
    if problems:
        raise ConfigError(problems)
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
    return list(itertools.product(*choices.values()))


def _values(override: Override, text: str, offered: Sequence[str]) -> list[str]:
    """Of one sweep. offered: the options of its group, for a glob."""
    if not override.is_discrete_sweep():
        raise ConfigError(
            [f"{text}: an interval has no list of values; write choices, range(FROM,TO,STEP), or hydra/sweeper=optuna"]
        )  # fmt: skip
    value = override.value()
    try:
        found = value.filter(list(offered)) if isinstance(value, Glob) else list(override.sweep_string_iterator())
    except (ValueError, HydraException) as error:  # a range's step of 0
        raise ConfigError([f"{text}: {error}"]) from None
    if not found:
        raise ConfigError([f"{text} has no value: no job would run; give at least one"])
    return found
