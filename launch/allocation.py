"""The hosts of the Slurm allocation that this process is in, and reaching them through srun in place of ssh."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conf.load import ConfigError
from conf.schema import Config
from launch.remote import ROOT, Answer, ask, at_once
from launch.slurm_layout import layout
from launch.slurm_names import names


@dataclass(frozen=True)
class Srun:
    """As `launch.remote.Ssh`. Each call is a step that shares the allocation with others."""

    script: str

    def command(self, host: str, verb: str) -> list[str]:
        there = [sys.executable, str(ROOT / "launch" / self.script), verb]
        return ["srun", f"--nodelist={host}", "--nodes=1", "--ntasks=1", "--overlap", *there]

    def call(self, verb: str, orders: Mapping[str, Mapping[str, Any]], *, timeout_s: float = 60.0) -> list[Answer]:
        return at_once(lambda host: ask(host, self.command(host, verb), orders[host], timeout_s), list(orders))

    def addresses(self, hosts: Sequence[str]) -> dict[str, str]:
        return {host: host for host in hosts}


def as_hostfile(config: Config, environ: Mapping[str, str] = os.environ) -> str:
    """A line `NAME slots=RANKS` a host: the ranks that launch/slurm.sbatch would start. ConfigError outside of one."""
    listed = environ.get("SLURM_JOB_NODELIST")
    if listed is None:
        raise ConfigError(
            ["--slurm: this is no Slurm allocation (no SLURM_JOB_NODELIST); start it by sbatch or salloc"]
        )
    slots = layout(environ, names(listed), config).slots
    return "".join(f"{host} slots={len(ones)}\n" for host, ones in slots.items())
