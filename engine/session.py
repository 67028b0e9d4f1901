"""The frame of a run on one rank: process group, axis groups, run folder, and what happens when something fails."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from conf.schema import Config, DType
from engine import last_state
from engine.device import Device, this_device
from engine.distributed import broadcast, gather, start, stop
from engine.failure import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
    EXIT_STOPPED_BY_ALERT,
    EXIT_TERMINATED,
    StoppedByAlert,
    StoppedOnRequest,
    claim_failure,
    follow_launcher,
    leave,
    report_failure,
)
from engine.watchdog import Watchdog
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
    143, both through the `with` blocks inside, so that records are closed. While `finishes_steps`, they only raise
    `stop_requested`; StoppedOnRequest ends the process with 75, StoppedByAlert with 76.
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
        self.finishes_steps = False  # while True, the first request to stop waits for the end of the step
        self._requests: dict[int, float] = {}  # signal -> when it first came

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
        self.control = dist.new_group(backend="gloo")  # for `agree`: on the host, whatever the tensors live on
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._asked_to_stop)  # not before: a rank that waits for its peers would not notice
        follow_launcher()
        self.folder = Path(broadcast(str(self.folder)))
        self.folder.mkdir(parents=True, exist_ok=True)  # on a machine that does not share rank 0's disk
        self.watchdog = Watchdog(
            self.folder, rank=self.rank, world_size=self.plan.world_size, timeout_s=self.config.cluster.hang_timeout_s
        )
        self.hosts = gather(socket.gethostname())
        self.groups = open_groups(self.plan)
        self.streams = RandomStreams(
            tensor_rank=self.groups.tensor.rank, device=self.device.torch_device, seed=self.config.seed
        )

    @property
    def stop_requested(self) -> bool:
        return bool(self._requests)

    def agree(self, *flags: bool) -> list[bool]:
        """Each flag as soon as one rank raises it, on every rank alike."""
        raised = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(raised, op=dist.ReduceOp.MAX, group=self.control)
        return [bool(value) for value in raised.tolist()]

    def _asked_to_stop(self, number: int, frame: object) -> None:
        """SIGTERM, SIGUSR1 (Slurm's warning) or Ctrl-C. The same one again after a second: stop at once.

        Launchers that get Ctrl-C send SIGTERM in addition, so another signal is no second request. Where a rank has
        failed there is no step to finish.
        """
        now = time.monotonic()
        again = now - self._requests.setdefault(number, now) > 1.0
        failed = self.folder is not None and (self.folder / "failed.json").exists()
        if self.finishes_steps and not again and not failed:
            if self.rank == 0 and len(self._requests) == 1:
                name = signal.Signals(number).name
                announce(f"{name}: this step is finished and saved, then the run ends; again: it ends at once")
            return
        for one in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(one, signal.SIG_IGN)  # once is enough: closing the records takes a moment
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGUSR1 and not self.finishes_steps:
            print(f"rank {self.rank}: SIGUSR1 while nothing trains: nothing to save, the run ends", flush=True)
            raise Terminated(EXIT_REQUEUE)
        raise Terminated(EXIT_TERMINATED)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._fail(error)
        self.watchdog.close()
        stop()

    def _fail(self, error: BaseException) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if isinstance(error, StoppedOnRequest):
            announce(str(error))
            dist.barrier(group=self.control)  # a launcher kills the other ranks when the first one leaves
            leave(EXIT_REQUEUE)
        if isinstance(error, StoppedByAlert):
            report_failure(self.folder, error, rank=self.rank, state=last_state.describe())
            dist.barrier(group=self.control)
            leave(EXIT_STOPPED_BY_ALERT)
        if isinstance(error, KeyboardInterrupt):
            word, code = ("terminated", error.code) if isinstance(error, Terminated) else _INTERRUPTED
            if self.folder is not None:
                claim_failure(self.folder, rank=self.rank, error=word, outcome=word)
            leave(code)
        report_failure(self.folder, error, rank=self.rank, state=last_state.describe())
        leave(EXIT_FAILED)


def announce(text: str) -> None:
    """Print on rank 0 only, also before a session is open."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGUSR1 ends this rank at once; code: what to leave with."""

    def __init__(self, code: int):
        self.code = code


_INTERRUPTED = ("interrupted", EXIT_INTERRUPTED)
