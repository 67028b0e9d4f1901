"""launch/node.sh started on each host, as a scheduler does: what its tests share."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.cluster.hosts import Hosts
from tests.cluster.runs import ROOT, environ

NODE = str(ROOT / "launch" / "node.sh")


class Nodes:
    """One command a host, its output in output-N.txt; `words[n]`: of host n behind HOSTFILE, None: not started."""

    def __init__(
        self, hosts: Hosts, folder: Path, words: Sequence[Sequence[str] | None], *, slots: int = 1, **more: str
    ):
        self.hosts, self.folder = hosts, folder
        hostfile = str(hosts.hostfile(folder / "hosts", slots=slots))
        given = environ(hosts, **more)
        self.started = [
            hosts[n].start([NODE, hostfile, *mine], folder=folder, output=folder / f"output-{n}.txt", environ=given)
            for n, mine in enumerate(words)
            if mine is not None
        ]

    def wait(self, seconds: float) -> list[int]:
        try:
            return [process.wait(timeout=seconds) for process in self.started]
        except subprocess.TimeoutExpired as error:
            raise AssertionError("\n".join(self.outputs)) from error

    @property
    def outputs(self) -> list[str]:
        return [path.read_text() for path in sorted(self.folder.glob("output-*.txt"))]

    def rank_on(self, node: int) -> psutil.Process:
        (found,) = [process for process in self.hosts[node].processes() if "--local_rank=0" in process.cmdline()]
        return found

    def end(self) -> None:
        for process in self.hosts.processes():
            process.kill()
        for started in self.started:
            started.wait()
