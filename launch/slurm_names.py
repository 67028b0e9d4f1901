"""What Slurm's variables say, and its compressed lists written out: hosts `a,b[001-003],c-[1-2]-x`, counts `2(x3),1`.

`scontrol show hostnames` says the same where Slurm's commands are installed, and is asked first (`names`).
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping

from conf.load import ConfigError

ENTRY = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")  # commas inside brackets do not separate
RANGES = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*")
COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def required(environ: Mapping[str, str], name: str) -> str:
    """A variable that is set in every job, or task, that launch/slurm.sbatch runs in. Raises ConfigError."""
    text = environ.get(name, "")
    if not text:
        raise ConfigError([
            f"{name} is not set, as Slurm sets it in a job; submit it: sbatch -N HOSTS launch/slurm.sbatch RECIPE ..."
        ])  # fmt: skip
    return text


def number(environ: Mapping[str, str], name: str) -> int:
    """Raises ConfigError."""
    text = required(environ, name)
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError([f"{name}={text} is not a number, as Slurm sets it; do not set it yourself"])
    return int(text)


def names(text: str) -> list[str]:
    """The hosts of SLURM_JOB_NODELIST, in Slurm's order."""
    if shutil.which("scontrol") is None:
        return expand_hosts(text)
    done = subprocess.run(["scontrol", "show", "hostnames", text], capture_output=True, text=True)
    if done.returncode != 0 or not done.stdout.split():
        *_, why = done.stderr.strip().split("\n")  # before it: what it tried
        raise ConfigError([f"scontrol does not read the hosts {text!r}: {why}"])
    return done.stdout.split()


def expand_hosts(text: str) -> list[str]:
    """Raises ConfigError for what is no list of hosts."""
    entries = ENTRY.findall(text)
    if ",".join(entries) != text or not entries:
        raise ConfigError([f"{text!r} is not a list of hosts as Slurm writes it: a,b[001-003]"])
    return [name for entry in entries for name in _expand_one(entry)]


def _expand_one(entry: str) -> Iterator[str]:
    """Of one entry; several brackets give every combination, the last varying fastest."""
    parts: list[list[str]] = []
    for plain, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", entry):
        if plain:
            parts.append([plain])
            continue
        if not RANGES.fullmatch(ranges):
            raise ConfigError([f"[{ranges}] in {entry!r} are not ranges as Slurm writes them: [001-003,010]"])
        parts.append([number for one in ranges.split(",") for number in _numbers(one)])
    return map("".join, itertools.product(*parts))


def _numbers(text: str) -> list[str]:
    """`001-003` -> 001, 002, 003: as many digits as the first has. Raises ConfigError."""
    low, _, high = text.partition("-")
    if int(high or low) < int(low):
        raise ConfigError([f"[{text}] is a range of no hosts; write it as Slurm does, the lower first: [{high}-{low}]"])
    return [str(number).zfill(len(low)) for number in range(int(low), int(high or low) + 1)]


def expand_counts(text: str) -> list[int]:
    """Of SLURM_TASKS_PER_NODE: a number a host. Raises ConfigError."""
    found = []
    for entry in text.split(","):
        match = COUNT.fullmatch(entry)
        if match is None:
            raise ConfigError([f"{text!r} are not counts as Slurm writes them: 2(x3),1"])
        found += [int(match[1])] * int(match[2] or 1)
    return found
