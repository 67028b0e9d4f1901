"""Launchers that were started apart, one a host, find each other on rank 0's port before any rank starts there.

The first host's launcher listens; the others say who they are and what they were told to run, and wait. When all are
there, all go; one that does not come, or was told something else, is named on every host. The connections stay open:
a host that fails, or is lost, is known to all while the ranks run. Not here: what is run (launch/node.py).
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conf.load import ConfigError

HELLO_S = 10.0
KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 15, socket.TCP_KEEPCNT: 3}  # lost after 60 s of silence


class AbsentError(Exception):
    """Not all hosts came, or the first is gone; says which."""


@dataclass(frozen=True)
class Failure:
    """host: where; code: of its launcher, None where the host is lost; at: when it was known, time.monotonic()."""

    host: str
    code: int | None
    at: float


@dataclass
class Met:
    """All hosts, from one of them. links: to the others (from the first host) or to the first; by node rank."""

    hosts: Sequence[str]
    node: int
    links: Mapping[int, socket.socket] = field(default_factory=dict)
    failure: Failure | None = None  # the first of another host
    _ended: dict[int, int | None] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def addresses(self) -> list[str]:
        """This host's own, on its ways to the others."""
        found = {str(link.getsockname()[0]).partition("%")[0].removeprefix("::ffff:") for link in self.links.values()}
        return sorted(found)

    def listen(self) -> None:
        for node, link in self.links.items():
            threading.Thread(target=self._follow, args=(node, link), name=f"node-{node}", daemon=True).start()

    def _follow(self, node: int, link: socket.socket) -> None:
        link.settimeout(None)
        try:
            for line in link.makefile("r"):
                self._hear(node, json.loads(line))
        except (OSError, ValueError):
            pass  # lost: as at the end of what it said
        with self._changed:
            if node not in self._ended:
                self._ended[node] = None
                self._fail(self.hosts[node], None)
            self._changed.notify_all()

    def _hear(self, node: int, said: dict[str, Any]) -> None:
        with self._changed:
            if "failed" in said:
                self._fail(said["failed"], said["code"])
            else:
                self._ended[node] = code = int(said["ended"])
                if code != 0:
                    self._fail(self.hosts[node], code)
            self._changed.notify_all()

    def _fail(self, host: str, code: int | None) -> None:
        if self.failure is None:
            self.failure = Failure(host, code, time.monotonic())
            if self.node == 0:
                self._tell({"failed": host, "code": code})

    def _tell(self, what: Mapping[str, Any]) -> None:
        for link in self.links.values():
            _send(link, what)

    def first_failure(self, *, patience_s: float) -> Failure | None:
        """Of another host, which may become known a moment after it ended the ranks here."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, timeout=patience_s)
            known = self.failure
        return None if known is None or known.host == self.hosts[self.node] else known

    def end(self, code: int, *, patience_s: float) -> int:
        """Tell the others how this host ended; what the run's code is. A host that ended well waits for the first one's
        word, the first `patience_s` for the others'.
        """
        with self._changed:
            if self.node == 0 and code == 0:
                self._changed.wait_for(lambda: len(self._ended) == len(self.links), timeout=patience_s)
                code = next((1 if one is None else one for one in self._ended.values() if one != 0), 0)
            self._tell({"ended": code})
            if self.node != 0 and code == 0:
                self._changed.wait_for(lambda: 0 in self._ended)
                code = 1 if self._ended[0] is None else self._ended[0]
        return code


def _send(link: socket.socket, what: Mapping[str, Any]) -> bool:
    try:
        link.sendall(json.dumps(what).encode() + b"\n")
        return True
    except OSError:  # it is gone, which its reader notices
        return False


def gather(hosts: Sequence[str], *, address: str, port: int, words: str, seconds: float) -> Met:
    """The first host's side: wait for all others. address: where they look for it. words: what every host was told,
    in short. Raises AbsentError, and ConfigError for a host that was told something else, or that it is the first too.
    """
    links: dict[int, socket.socket] = {}
    refused: list[str] = []
    changed, over = threading.Lock(), threading.Event()
    mine = {"node": 0, "words": words, "name": socket.gethostname(), "token": secrets.token_hex(8)}

    def greet(link: socket.socket) -> None:
        try:
            link.settimeout(HELLO_S)
            hello = json.loads(_line(link))
            node, theirs = int(hello["node"]), str(hello["words"])
            link.settimeout(None)
        except (OSError, ValueError, KeyError, TypeError):
            link.close()  # a stranger
            return
        if node == 0 and hello.get("token") == mine["token"]:
            link.close()  # it is us: see look_for_another
            return
        with changed:
            old = links.get(node)
            problem = None
            if node == 0:
                both = f"hosts {mine['name']} and {hello.get('name')} both say they are node 0 ({hosts[0]})"
                problem = f"{both}; give each its own --node_rank, 0 to {len(hosts) - 1}"
            elif not 0 < node < len(hosts):
                problem = (
                    f"{hello.get('name')} says it is node {node}; beside {hosts[0]} there are 1 to {len(hosts) - 1}"
                )
            elif theirs != words:
                problem = f"host {hosts[node]} was started with other overrides or another hostfile than {hosts[0]}"
            elif old is not None and _is_open(old):
                problem = f"two hosts say they are node {node} ({hosts[node]}); give each its own --node_rank"
            if problem is not None:
                refused.append(problem)
                _send(link, {"refused": problem})
            else:
                links[node] = link

    def complete() -> bool:
        with changed:
            for node in [node for node, link in links.items() if not _is_open(link)]:
                del links[node]  # it left again
            return bool(refused) or len(links) == len(hosts) - 1

    def look_for_another() -> None:
        """Where the others look for the first host: this one answers there, or another that is told to be the first."""
        while not over.wait(0.5):
            try:
                with socket.create_connection((address, port), timeout=HELLO_S) as link:
                    _send(link, mine)
                    line = _line(link)
            except OSError:
                continue
            if line:
                with changed:
                    refused.append(str(json.loads(line).get("refused")))
            return

    end = time.monotonic() + seconds
    with listening(port) as server:
        server.settimeout(0.2)
        threading.Thread(target=look_for_another, daemon=True).start()
        while not complete() and time.monotonic() < end:
            try:
                link, _ = server.accept()
            except TimeoutError:
                continue
            threading.Thread(target=greet, args=(link,), daemon=True).start()
        over.set()
    with changed:
        if refused:
            for link in links.values():
                _send(link, {"refused": refused[0]})
            raise ConfigError([refused[0]])
        missing = [f"{host} (node {node})" for node, host in enumerate(hosts) if node and node not in links]
        if missing:
            text = f"host {', '.join(missing)} did not come to port {port} of {hosts[0]} within {seconds:g} s"
            for link in links.values():
                _send(link, {"absent": text})
            raise AbsentError(text)
        for link in links.values():
            _keep(link)
            _send(link, {"go": True})
    met = Met(hosts, 0, links)
    met.listen()
    return met


def listening(port: int) -> socket.socket:
    """On every address of this host. Raises ConfigError where something has the port."""
    both = socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=512)
    except OSError as error:
        raise ConfigError(
            [f"MASTER_PORT={port} cannot be used here: {os.strerror(error.errno or 0)}; give all hosts another"]
        ) from None


def join(hosts: Sequence[str], node: int, *, address: str, port: int, words: str, seconds: float) -> Met:
    """Another host's side: find the first, and wait until all are there. Raises AbsentError and ConfigError."""
    end = time.monotonic() + seconds
    where = f"host {hosts[0]} (node 0, {address} port {port})"
    while True:
        try:
            link = socket.create_connection((address, port), timeout=max(0.1, min(10.0, end - time.monotonic())))
            link.settimeout(seconds + HELLO_S)
            _send(link, {"node": node, "words": words, "name": socket.gethostname()})
            line = _line(link)
            if line:
                break
            error: object = "it left before all hosts were there"
        except OSError as caught:  # its name may not be known yet either
            error = caught
        if time.monotonic() > end:
            raise AbsentError(
                f"{where} did not answer within {seconds:g} s: {error}; start it there too, as --node_rank 0"
            )
        time.sleep(0.5)
    said = json.loads(line)
    if "refused" in said:
        raise ConfigError([said["refused"]])
    if "absent" in said:
        raise AbsentError(said["absent"])
    _keep(link)
    met = Met(hosts, node, {0: link})
    met.listen()
    return met


def _line(link: socket.socket) -> bytes:
    """One line and no byte more; empty where the other side left."""
    line = b""
    while not line.endswith(b"\n"):
        byte = link.recv(1)
        if not byte:
            return b""
        line += byte
    return line


def _keep(link: socket.socket) -> None:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        link.setsockopt(socket.IPPROTO_TCP, option, value)


def _is_open(link: socket.socket) -> bool:
    """Whether the other side, which says nothing more for now, still holds it."""
    try:
        return link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
