"""What the launcher asks hosts before it starts ranks on them: whether they answer, their network, rank 0's port.

Not here: how a host is reached (remote.py), and what it does to answer (on_host.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.hostfile import Slots
from conf.load import ConfigError
from launch import environment
from launch.remote import Answer, Ssh
from parallel.hardware import device_kind

REACH_S = 5.0  # for the port of rank 0
LOOK_S = 20.0  # for a host to say that it lives


@dataclass(frozen=True)
class Asked:
    """The hostfile's hosts as they are now. silent: why some do not answer; device: what the others compute on."""

    hosts: Slots
    silent: Mapping[str, str]
    device: str

    @property
    def answering(self) -> list[str]:
        return [host for host in self.hosts if host not in self.silent]

    @property
    def why_not(self) -> list[str]:
        return [f"host {host}: {why}" for host, why in self.silent.items()]


def who_answers(hosts: Slots, ssh: Ssh, *, interface: str | None) -> Asked:
    orders: dict[str, dict[str, Any]] = {
        host: {"folder": os.getcwd(), "interface": interface, "peers": [], "port": None} for host in hosts
    }
    answers = ssh.call("look", orders, timeout_s=LOOK_S)
    silent = {one.host: one.problem for one in answers if one.problem is not None}
    given = environment.of_files(os.environ) | dict(os.environ)
    devices = [device_kind(given)] if "DS_ACCELERATOR" in given else []
    devices += [one.values["device"] for one in answers if one.problem is None]
    return Asked(hosts, silent, devices[0] if devices else "cpu")


def ask_hosts(hosts: Slots, ssh: Ssh, *, interface: str | None, runs: Path) -> tuple[list[Answer], str, str]:
    """Every host's answer, and the master's address and port; ConfigError with what each host lacks. runs: where the
    runs are kept, which all must share.
    """
    names = ssh.addresses(list(hosts))
    given, address = int(os.environ.get("MASTER_PORT", "0")), os.environ.get("MASTER_ADDR")
    orders = {
        host: {
            "folder": os.getcwd(), "interface": interface,
            "peers": [names[peer] for peer in hosts if peer != host], "port": given if number == 0 else None,
        }
        for number, host in enumerate(hosts)
    }  # fmt: skip
    with _token(runs) as token:
        answers = told(ssh, "look", {host: {**order, "token": str(token)} for host, order in orders.items()})
    refuse_twice({answer.host: answer.values["machine"] for answer in answers})
    first = answers[0]
    if address is not None:
        check_address(address, first.values["addresses"], first.host)
    master, port = address or first.values["address"], first.values["port"]
    meeting = {"address": master, "port": port, "seconds": REACH_S}
    told(ssh, "meet", {host: meeting | {"knocks": len(hosts) - 1 if host == first.host else None} for host in hosts})
    return answers, master, str(port)


@contextlib.contextmanager
def _token(runs: Path) -> Iterator[Path]:
    """A file in the folder of the runs, or where that will be made. ConfigError where none can be written."""
    folder = next(folder for folder in (runs, *runs.parents) if folder.is_dir())
    token = folder / f".launch-{secrets.token_hex(8)}"
    try:
        token.touch()
    except OSError as error:
        raise ConfigError([f"{folder} cannot be written ({error.strerror}); give another run.dir"]) from None
    try:
        yield token
    finally:
        token.unlink(missing_ok=True)


def refuse_twice(machines: Mapping[str, str]) -> None:
    """ConfigError where two of the hosts are one. machines: what tells one from another, by host."""
    problems = [f"host {host}: {problem}" for host, problem in named_twice(machines).items()]
    if problems:
        raise ConfigError(problems)


def named_twice(machines: Mapping[str, str]) -> dict[str, str]:
    """The hosts that another one before them is too: what is wrong with each, and what to do."""
    first: dict[str, str] = {}
    for host, one in machines.items():
        first.setdefault(one, host)
    return {
        host: f"it is {first[one]} under another name; give all its slots in one line"
        for host, one in machines.items()
        if first[one] != host
    }


def check_address(address: str, interfaces: Mapping[str, Sequence[str]], host: str) -> None:
    """Whether MASTER_ADDR is one of the first host's, where it is no name. Raises ConfigError."""
    mine = [one for ones in interfaces.values() for one in ones]
    if address not in mine and re.fullmatch(r"[0-9.]+|[0-9a-fA-F:]*:[0-9a-fA-F:]*", address):
        raise ConfigError(
            [f"MASTER_ADDR={address} is no address of {host}, where rank 0 runs; it has {', '.join(mine)}"]
        )


def told(ssh: Ssh, verb: str, orders: Mapping[str, Mapping[str, Any]]) -> list[Answer]:
    """The hosts' answers. Raises ConfigError with a line for each that has a problem."""
    answers = ssh.call(verb, orders)
    problems = [f"host {one.host}: {one.problem}" for one in answers if one.problem is not None]
    if problems:
        raise ConfigError(problems)
    return answers
