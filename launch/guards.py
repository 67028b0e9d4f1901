"""A guard on every host of a run: signs of life between the launcher and each host, both ways, over ssh.

The launcher learns which host is lost although its ranks say nothing; a host that has lost the launcher ends its ranks
by itself (on_host.py), so that nothing trains on where nobody can end it. Not here: what follows (watch.py).
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from launch.remote import Ssh

SIGNS = 5  # that a host may miss before it counts as lost


class Guards:
    """with Guards(...) as guards: ...; orders: as `Job.orders`."""

    def __init__(self, ssh: Ssh, orders: Mapping[str, Mapping[str, Any]], *, lost_after_s: float):
        self.lost_after_s, self.tick_s = lost_after_s, lost_after_s / SIGNS
        self.silent_s = dict.fromkeys(orders, 0.0)
        self.closed: set[str] = set()  # hosts whose connection has ended
        self._done = threading.Event()
        self._ends: dict[str, tuple[socket.socket, subprocess.Popen[bytes]]] = {}
        for host, order in orders.items():
            ours, theirs = socket.socketpair()
            process = subprocess.Popen(
                ssh.command(host, "guard"), stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is for the ranks
            )  # fmt: skip
            theirs.close()
            ours.sendall(json.dumps({**order, "lost_after_s": lost_after_s}).encode() + b"\n")
            ours.setblocking(False)
            self._ends[host] = ours, process
        self._thread = threading.Thread(target=self._talk, daemon=True)

    def __enter__(self) -> Guards:
        self._thread.start()
        return self

    def _talk(self) -> None:
        before = time.monotonic()
        while not self._done.wait(self.tick_s):
            now = time.monotonic()
            passed, before = min(now - before, 2 * self.tick_s), now  # more is time in which this process was suspended
            for host, (ours, _) in self._ends.items():
                said = self._exchange(ours)
                if said == b"":
                    self.closed.add(host)
                self.silent_s[host] = 0.0 if said else self.silent_s[host] + passed

    @staticmethod
    def _exchange(ours: socket.socket) -> bytes | None:
        """What the host said since, None for nothing, b"" where it never will again."""
        try:
            ours.send(b"\n")
            return ours.recv(65536)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    @property
    def silent(self) -> list[str]:
        """Hosts that gave no sign for too long."""
        return [host for host, silent_s in self.silent_s.items() if silent_s >= self.lost_after_s]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        for ours, _ in self._ends.values():
            with contextlib.suppress(OSError):
                ours.send(b"done\n")
            ours.close()
        deadline = time.monotonic() + 2.0
        for _, process in self._ends.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
