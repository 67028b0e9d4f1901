"""The questions of a preflight, in their order: each goes to all hosts at once, and to those only that can answer it.

A host that is lost, or fails at a question, has a red cell there; the others are asked on. Not here: what the answers
mean (preflight_checks.py and beside).
"""

from __future__ import annotations

import os
import secrets
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from conf.hostfile import Slots, ranks
from conf.load import ConfigError
from launch import environment, preflight_checks, preflight_machine, preflight_rates
from launch.ask import REACH_S, check_address, named_twice
from launch.preflight_checks import Answers
from launch.preflight_table import Cell, Row, good, wrong
from launch.remote import Answer, at_once
from launch.request import Request

VERBS = ("facts", "view", "look", "meet", "write", "read", "clear", "clock", "rates")
FOLDERS = {"run folder": "run.dir", "corpus folder": "data.cache_dir"}
EXCHANGES, CLOCK_WAIT_S = 5, 20.0
RATES_S = 45.0  # for all of them, start of the ranks included
TOGETHER_S = 0.5  # problems of two hosts within it: either may be the cause


class Transport(Protocol):
    """`launch.remote.Ssh`, or another way to a host."""

    def command(self, host: str, verb: str) -> list[str]: ...

    def call(self, verb: str, orders: Mapping[str, Mapping[str, Any]], *, timeout_s: float = 60.0) -> list[Answer]: ...

    def addresses(self, hosts: Sequence[str]) -> dict[str, str]: ...


@dataclass(frozen=True)
class Preflight:
    """Of one run. hosts: all that are checked; first: those of them that its plan is for, the others are spares;
    rates: whether they are measured.
    """

    request: Request
    hosts: Slots
    first: Slots
    transport: Transport
    dtype: str
    rates: bool

    def rows(self) -> list[Row]:
        about = {
            "folder": os.getcwd(), "recipe": str(self.request.recipe), "overrides": self.request.overrides,
            "world_size": self._world_size, "environ": self._environ(None),
        }  # fmt: skip
        facts, lost = self._ask("facts", {host: about for host in self.hosts})
        twice = named_twice({host: one["machine"] for host, one in facts.items()})
        reachable = dict.fromkeys(facts, good()) | _red(lost | twice, "ssh HOST true must work from here")
        rows = [self._row("reachable", reachable)]
        facts = {host: one for host, one in facts.items() if host not in twice}  # what it has is told once
        if not facts:
            return rows
        ranks = ranks_of(self.first)
        most = max(ranks.values(), key=len)  # a spare may take the place of any
        ranks |= {host: most[: len(slots)] for host, slots in self.hosts.items() if host not in ranks}
        views, refused = self._ask("view", {host: about | {"ranks": ranks[host]} for host in facts})
        red_view = _red(refused, "look at the message; recipes/plan.py says which plans would do")
        devices = preflight_machine.devices(facts, views, self.hosts)
        rows += [
            self._row("python", preflight_checks.python(facts)),
            self._row("packages", preflight_checks.packages(facts)),
            self._row("code", preflight_checks.code(facts, views)),
            self._row("environment", preflight_checks.environment(views)),
            self._row("config", preflight_checks.config(views) | red_view),
            self._row("devices", devices),
            self._row("gpu health", preflight_machine.health(facts, self.hosts)),
            self._row("memory", preflight_machine.memory(facts, views, self.hosts)),
            self._row("disk", preflight_machine.disk(views)),
            self._row("/dev/shm", preflight_machine.shared_memory(facts, views)),
            self._row("open files", preflight_machine.open_files(facts, world_size=self._world_size)),
            *self._folders(views),
            self._row("clock", self._clocks(list(facts))),
        ]
        network, found = self._network(list(facts))
        rows.append(self._row("network", network))
        if self.rates:
            ready = [host for host in views if network[host].ok and devices[host].ok]
            rows += self._rates(ready, found, views)
        return (
            rows if any(one["gpus"] for one in facts.values()) else [row for row in rows if row.check != "gpu health"]
        )

    @property
    def _world_size(self) -> int:
        return ranks(self.first)

    def _environ(self, interface: str | None) -> dict[str, str]:
        """Of a rank on a host that meets the others over that interface, as launch/multinode.py gives it."""
        shared = environment.travelling(os.environ) | environment.of_files(os.environ)
        return environment.with_network(shared, interface, named=self.request.interface is not None)

    def _row(self, check: str, cells: Mapping[str, Cell]) -> Row:
        return Row.over(check, list(self.hosts), cells)

    def _ask(
        self, verb: str, orders: Mapping[str, Mapping[str, Any]], *, timeout_s: float = 60.0
    ) -> tuple[dict[str, Mapping[str, Any]], dict[str, str]]:
        """(values, problems) by host."""
        answers = self.transport.call(verb, orders, timeout_s=timeout_s) if orders else []
        return (
            {one.host: one.values for one in answers if one.problem is None},
            {one.host: one.problem for one in answers if one.problem is not None},
        )

    def _folders(self, views: Mapping[str, Mapping[str, Any]]) -> list[Row]:
        """Each host leaves a token in each folder, then looks for all."""
        nodes, token = list(views), secrets.token_hex(8)
        about = {"id": token[:8], "tokens": [f"{host} {token}" for host in nodes]}
        orders = {host: about | {"node": n, "folders": views[host]["folders"]} for n, host in enumerate(nodes)}
        try:
            written, lost = self._ask("write", orders)
            seen, lost_later = self._ask("read", {host: orders[host] for host in written})
        finally:
            self._ask("clear", orders)
        for host, problem in (lost | lost_later).items():
            written[host] = {"problems": dict.fromkeys(FOLDERS, problem)}
            seen[host] = {"unseen": {name: [] for name in FOLDERS}}
        rows = []
        for name, knob in FOLDERS.items():
            paths = {host: views[host]["folders"][name] for host in nodes}
            cells = preflight_checks.shared_folder(name, knob, paths, written, seen, nodes=nodes)
            rows.append(self._row(name, cells))
        return rows

    def _clocks(self, hosts: Sequence[str]) -> dict[str, Cell]:
        found = dict(
            zip(hosts, at_once(lambda host: clock_of(self.transport.command(host, "clock")), hosts), strict=True)
        )
        cells = preflight_checks.clocks({host: offset for host, offset in found.items() if offset is not None})
        late = wrong(
            f"it told no time within {CLOCK_WAIT_S:g} s", "ask again; something holds up that host or its network"
        )
        return {host: cells.get(host, late) for host in hosts}

    def _network(self, alive: Sequence[str]) -> tuple[dict[str, Cell], dict[str, Mapping[str, Any]]]:
        """Every host's way to the others, and rank 0's port: free, and reached from all. (cells, what each found)"""
        first = next(iter(self.hosts))
        names, given = self.transport.addresses(alive), os.environ.get("MASTER_ADDR")
        about = {"folder": os.getcwd(), "interface": self.request.interface}
        orders = {
            host: about | {
                "peers": [names[peer] for peer in alive if peer != host],
                "port": int(os.environ.get("MASTER_PORT", "0")) if host == first else None,
            }
            for host in alive
        }  # fmt: skip
        found, problems = self._ask("look", orders)
        if first in found and given is not None:
            try:
                check_address(given, found[first]["addresses"], first)
            except ConfigError as error:
                problems[first] = f"{error.problems[0]}; unset it, or give one of these"
        if first not in found or first in problems:
            unknown = Cell(None, f"not checked: {first}, where rank 0 would listen, has no address and port")
            return dict.fromkeys(alive, unknown) | _red(problems, "look at the interface and the route there"), {}
        master, port = given or found[first]["address"], found[first]["port"]
        meeting = {"address": master, "port": port, "seconds": REACH_S}
        knocks = {host: len(found) - 1 if host == first else None for host in found}
        met, missed = self._ask("meet", {host: meeting | {"knocks": knocks[host]} for host in found})
        reached = good(f"rank 0's {master} port {port} is free" + (" and reached" if len(found) > 1 else ""))
        return dict.fromkeys(met, reached) | _red(problems | missed, "look at the interface and the route there"), found

    def _rates(self, ready: Sequence[str], found: Answers, views: Answers) -> list[Row]:
        """Of the hosts that can take part, where the first one, which the others meet, can."""
        first = next(iter(self.hosts))
        if first not in ready:
            return [self._row("matrix rate", {}), self._row("link rate", {})]
        slots = {host: self.hosts[host] for host in ready}
        ranks = ranks_of(slots)
        about = {
            "address": os.environ.get("MASTER_ADDR") or found[first]["address"], "port": found[first]["port"],
            "world_size": sum(map(len, slots.values())), "seconds": RATES_S,
            "probe": {"hosts": [len(slots[host]) for host in ready], "dtype": self.dtype},
        }  # fmt: skip
        orders = {
            host: about | {
                "environ": self._environ(found[host]["interface"]), "ranks": ranks[host], "slots": slots[host],
                "device": views[host]["device"],
            }
            for host in ready
        }  # fmt: skip
        answers = self.transport.call("rates", orders, timeout_s=RATES_S + 15)
        problems = first_problems(answers)
        if problems:
            red = _red(problems, "run launch/multinode.sh with recipes/probe.py on these hosts to see all of it")
            return [self._row("matrix rate", red), self._row("link rate", {})]
        measured = next(one.values["found"] for one in answers if one.host == first)
        flops = {host: [measured["matrix"][rank] for rank in ranks[host]] for host in ready}
        edges = {(ready[a], ready[b]): rate for a, b, rate in measured["links"]}
        alone = dict.fromkeys(ready, good("one host"))
        return [
            self._row("matrix rate", preflight_rates.matrix(flops, slots)),
            self._row("link rate", preflight_rates.links(edges) if edges else alone),
        ]


def first_problems(answers: Sequence[Answer]) -> dict[str, str]:
    """Of the ranks: when those of one host fail the others lose it, so that who is later is no cause."""
    failed = {one.host: one.values.get("after", float("inf")) for one in answers if one.problem is not None}
    return {
        one.host: one.problem
        for one in answers
        if one.problem is not None and failed[one.host] <= min(failed.values()) + TOGETHER_S
    }


def ranks_of(slots: Slots) -> dict[str, list[int]]:
    """The global ranks of each host, in the order of the hostfile."""
    found, first = {}, 0
    for host, of_host in slots.items():
        found[host] = list(range(first, first + len(of_host)))
        first += len(of_host)
    return found


def _red(problems: Mapping[str, str], remedy: str) -> dict[str, Cell]:
    """Problems say `what is wrong; what to do`; some leave the latter out."""
    cells = {}
    for host, problem in problems.items():
        text, _, advice = problem.rpartition("; ")
        cells[host] = wrong(text, advice) if text else wrong(problem, remedy.replace("HOST", host))
    return cells


def clock_of(command: Sequence[str]) -> tuple[float, float] | None:
    """(seconds that a host is ahead, half of the shortest round trip) over a line that stays open."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    late = threading.Timer(CLOCK_WAIT_S, process.kill)
    late.start()
    found = []
    try:
        for _ in range(EXCHANGES):
            sent = time.time()
            process.stdin.write("\n")
            process.stdin.flush()
            line = next((line for line in process.stdout if line.startswith("time ")), None)
            if line is None:
                return None
            took = time.time() - sent
            found.append((took / 2, float(line.split()[1]) - sent - took / 2))
        process.stdin.close()
    except BrokenPipeError:
        return None
    finally:
        late.cancel()
        process.kill()
        process.wait()
    error, offset = min(found)
    return offset, error
