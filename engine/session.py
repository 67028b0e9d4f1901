"""The frame of a run on one rank: process group, axis groups, run folder, and what happens when something fails."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from conf.schema import Config, DType
from engine.device import Device, this_device
from engine.distributed import broadcast, gather, start, stop
from engine.failure import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    claim_failure,
    follow_launcher,
    leave,
    report_failure,
)
from model.tensor_parallel.random import RandomStreams
from parallel.groups import Groups, open_groups
from parallel.plan import ParallelPlan

DTYPES = {DType.fp32: torch.float32, DType.bf16: torch.bfloat16, DType.fp16: torch.float16}


@dataclass(frozen=True)
class Rates:
    """FLOP/s of one device: the data sheet's (None where unknown), and a matrix product's measured on all ranks at
    once.
    """

    peak: float | None
    measured: float


class Session:
    """with Session(config, plan) as session: ... — on every rank alike.

    rank, device, groups, streams, folder (the run's, the same on every rank), run_id, hosts. An exception inside the
    block is reported once for the whole run and ends this process with code 1; Ctrl-C ends it with 130, SIGTERM with
    143, both through the `with` blocks inside, so that records are closed.
    """

    device: Device
    groups: Groups
    streams: RandomStreams
    hosts: list[str]

    def __init__(self, config: Config, plan: ParallelPlan, *, folder: Path | None):
        """`folder`: the run's, on rank 0 (the others learn it)."""
        self.config = config
        self.plan = plan
        self.rank = int(os.environ.get("RANK", "0"))
        self.folder = folder

    @property
    def run_id(self) -> str:
        assert self.folder is not None
        return self.folder.name

    def __enter__(self) -> Session:
        try:
            self._open()
        except BaseException as error:
            self._fail(error)
        return self

    def _open(self) -> None:
        torch.use_deterministic_algorithms(self.config.train.deterministic, warn_only=True)
        # Else torch would write every new buffer once for nothing.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.device = this_device()
        start(self.device, timeout_s=self.config.cluster.timeout_s)
        signal.signal(signal.SIGTERM, _terminate)  # not before: a rank that waits for its peers would not notice
        follow_launcher()
        self.folder = Path(broadcast(str(self.folder)))
        self.folder.mkdir(parents=True, exist_ok=True)  # on a machine that does not share rank 0's disk
        self.hosts = gather(socket.gethostname())
        self.groups = open_groups(self.plan)
        self.streams = RandomStreams(
            tensor_rank=self.groups.tensor.rank, device=self.device.torch_device, seed=self.config.seed
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._fail(error)
        stop()

    def _fail(self, error: BaseException) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if isinstance(error, KeyboardInterrupt):
            terminated = isinstance(error, Terminated)
            if self.folder is not None:
                claim_failure(self.folder, rank=self.rank, error="terminated" if terminated else "interrupted")
            leave(EXIT_TERMINATED if terminated else EXIT_INTERRUPTED)
        report_failure(self.folder, error, rank=self.rank)
        leave(EXIT_FAILED)


def announce(text: str) -> None:
    """Print on rank 0 only, also before a session is open."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived: a launcher ends the ranks of a run in which one has failed."""


def _terminate(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: closing the records takes a moment
    raise Terminated
