"""Reaching all hosts at once through ssh, with the options that pdsh uses: each gives an answer, or why not.

Not here: what a host does with it (on_host.py).
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[1]
CONNECT_S = 10  # longest wait for a host's sshd


def patience(lost_after_s: float) -> str:
    """ssh's options with which a silent host ends a connection: ssh alone would wait for ever."""
    return f"-o BatchMode=yes -o ConnectTimeout={CONNECT_S} " + (
        f"-o ServerAliveInterval={math.ceil(lost_after_s / 4)} -o ServerAliveCountMax=4"
    )


def ssh_options(port: str | None, *, lost_after_s: float) -> str:
    """Those of the caller's environment, as pdsh takes them, and ours, separated by spaces."""
    given = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
    ones = (given, f"-p {port}" if port else "", patience(lost_after_s))
    return " ".join(option for option in ones if option)


@dataclass(frozen=True)
class Answer:
    """Of one host. problem: why it gave none, or what it lacks."""

    host: str
    values: Mapping[str, Any]
    problem: str | None


@dataclass(frozen=True)
class Ssh:
    """options: as pdsh appends them, separated by spaces. script: in launch/, what knows the verbs."""

    options: str
    script: str = "on_host.py"

    def command(self, host: str, verb: str) -> list[str]:
        there = shlex.join([sys.executable, str(ROOT / "launch" / self.script), verb])
        return ["ssh", *self.options.split(), host, there]

    def call(self, verb: str, orders: Mapping[str, Mapping[str, Any]], *, timeout_s: float = 60.0) -> list[Answer]:
        """The verb on every host of `orders`, with that host's order."""
        return at_once(lambda host: ask(host, self.command(host, verb), orders[host], timeout_s), list(orders))

    def addresses(self, hosts: Sequence[str]) -> dict[str, str]:
        """The name or address that ssh takes a host's name for: names of ~/.ssh/config are known to ssh alone."""
        found = {}
        for host in hosts:
            shown = subprocess.run(["ssh", "-G", *self.options.split(), host], capture_output=True, text=True).stdout
            names = [line.partition(" ")[2] for line in shown.splitlines() if line.startswith("hostname ")]
            found[host] = names[0] if names else host.rpartition("@")[2]
        return found


def at_once(task: Callable[[str], T], hosts: Sequence[str]) -> list[T]:
    """The task for all hosts at the same time, as some wait for others."""
    with ThreadPoolExecutor(max_workers=max(1, len(hosts))) as pool:
        return list(pool.map(task, hosts))


def ask(host: str, command: Sequence[str], order: Mapping[str, Any], timeout_s: float) -> Answer:
    """What the command that reaches the host answers to an order."""
    try:
        done = subprocess.run(
            command, input=json.dumps(order), capture_output=True, text=True, timeout=timeout_s,
            start_new_session=True,  # a Ctrl-C is for the ranks, not for this call
        )  # fmt: skip
        said = done.stderr.strip().splitlines()
        if done.returncode != 0:
            return Answer(host, {}, _why(done.returncode, said))
        values = json.loads(done.stdout.strip().splitlines()[-1])  # a login shell may print before it
    except subprocess.TimeoutExpired:
        return Answer(host, {}, f"no answer within {timeout_s:g} s")
    except (json.JSONDecodeError, IndexError):
        return Answer(host, {}, f"it answered {done.stdout[-200:]!r}")
    return Answer(host, values, values.get("problem"))


def _why(code: int, said: list[str]) -> str:
    last = said[-1] if said else f"code {code}"
    if code == 255:
        return f"ssh does not reach it: {last}"
    if code in (126, 127) or "can't open file" in last:
        return f"{last}; the hosts must share this repository and its .venv, under the same path"
    return last
