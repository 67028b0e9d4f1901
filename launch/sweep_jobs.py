"""The jobs of a sweep: the command lines that conf/sweeps.py makes of one, each as a run with a name of its own.

A sweep is an experiment: its folder is run.dir/SWEEP/, its runs SWEEP-00, SWEEP-01, ..., and the experiment is their
group in wandb. A job has the same name and folder whenever it is started again. Not here: how jobs are run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from conf.load import ConfigError
from conf.sweeps import expand as expand

LONGEST = 120  # characters of a run's name; wandb takes 128
# Hydra's, which run no job here.
SWEEPERS = ("hydra/sweeper", "hydra/launcher", "hydra.sweeper", "hydra.launcher", "hydra.sweep")


@dataclass(frozen=True)
class SweepJob:
    """number: from 0. overrides: the whole command line of the recipe. swept: its words that not all jobs share."""

    number: int
    run_id: str
    overrides: tuple[str, ...]
    swept: tuple[str, ...]


def jobs_of(overrides: Sequence[str], sweep: str, *, config_dir: str | None = None) -> list[SweepJob]:
    """Every job with its own run.id, all of the experiment `sweep`. Raises ConfigError."""
    refuse_reserved(overrides, hydras=SWEEPERS)
    expanded = expand(overrides, config_dir=config_dir)
    shared = set(expanded[0]).intersection(*expanded)
    return [
        named(words, [word for word in words if word not in shared], sweep=sweep, number=number)
        for number, words in enumerate(expanded)
    ]


def refuse_reserved(overrides: Sequence[str], *, hydras: tuple[str, ...] = ()) -> None:
    """Raises ConfigError for what would be the same for all jobs and is each one's own. hydras: keys of Hydra's."""
    problems = []
    for text in overrides:
        key, _, value = text.lstrip("+~").partition("=")
        if key == "run.id":
            problems.append(
                f"{text}: every job of a sweep has a run.id of its own; leave it out (--id names the sweep)"
            )
        if key == "run.experiment":
            problems.append(f"{text}: a sweep is an experiment of its own; leave it out and give --id {value}")
        if hydras and key.startswith(hydras):
            problems.append(f"{text}: Hydra's sweepers and launchers do not run these jobs; leave it out")
    if problems:
        raise ConfigError(problems)


def named(words: Sequence[str], swept: Sequence[str], *, sweep: str, number: int) -> SweepJob:
    """The job with the overrides that make it a run of the sweep."""
    run_id = f"{sweep}-{number:02d}"
    added = [f"run.experiment={sweep}", f"run.id={run_id}"]
    if swept and not any(word.startswith("telemetry.wandb.name=") for word in words):
        plain = re.sub(r"[^\w=.,:+/ -]", "_", " ".join(swept))  # no quote, and nothing that Hydra would take for more
        added.append(f"telemetry.wandb.name='{plain[:LONGEST]}'")
    if not any(word.startswith("resume=") for word in words):
        added.append("resume=auto")
    return SweepJob(number, run_id, (*words, *added), tuple(swept))
