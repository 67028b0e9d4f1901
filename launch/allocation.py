"""The hosts of the Slurm allocation that this process is in, and reaching them through srun in place of ssh."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conf.load import ConfigError
from launch.remote import ROOT, Answer, ask, at_once


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


def as_hostfile(environ: Mapping[str, str] = os.environ) -> str:
    """A line `NAME slots=RANKS` a host: as many ranks as it gives GPUs, else tasks. ConfigError outside of one.

    Where nobody asked for a number of tasks, SLURM_TASKS_PER_NODE may be that of the CPUs: one rank a host.
    """
    names = environ.get("SLURM_JOB_NODELIST")
    if names is None:
        raise ConfigError(
            ["--slurm: this is no Slurm allocation (no SLURM_JOB_NODELIST); start it by sbatch or salloc"]
        )
    command = ["scontrol", "show", "hostnames", names]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError(["--slurm: there is no scontrol on the PATH; start it on a host of the cluster"]) from None
    if done.returncode != 0:
        raise ConfigError([f"--slurm: {' '.join(command)}: {done.stderr.strip()}"])
    hosts = done.stdout.split()
    asked = "SLURM_NTASKS" in environ or "SLURM_NTASKS_PER_NODE" in environ
    if gpus := environ.get("SLURM_GPUS_ON_NODE"):
        slots = [int(gpus)] * len(hosts)
    else:
        slots = counts(environ["SLURM_TASKS_PER_NODE"]) if asked else [1] * len(hosts)
    if len(slots) != len(hosts):
        raise ConfigError([f"--slurm: {len(hosts)} hosts ({names}) but tasks of {len(slots)}; ask for tasks by node"])
    return "".join(f"{host} slots={count}\n" for host, count in zip(hosts, slots, strict=True))


def counts(text: str) -> list[int]:
    """SLURM_TASKS_PER_NODE: "4(x2),3" is [4, 4, 3]."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]
