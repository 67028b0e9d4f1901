"""Saving and loading one rank's checkpoint beside torch.save and torch.load of the same bytes, in turns.

torch.save leaves its bytes in the page cache; a checkpoint of ours is on disk when the save ends, and every byte is
checked when it is loaded. torch.save followed by fsync is measured too.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch

from conf.schema import Config
from parallel.plan import ParallelPlan
from telemetry.tables import size, table


@dataclass
class CheckpointTimes:
    """bytes: of one checkpoint; seconds: of each round by what was done; pause: how long an asynchronous save holds
    training up."""

    bytes: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def rate(self, what: str) -> float:
        """Bytes per second, median."""
        return self.bytes / median(self.seconds[what])

    def text(self) -> str:
        """The table and the ratios that matter."""
        rows = [
            [what, f"{median(times):.3f}", f"{self.bytes / median(times) / 1e6:.0f} MB/s"]
            for what, times in self.seconds.items()
        ]
        pause = median(self.seconds["pause of an asynchronous save"]) / median(self.seconds["save"])
        return (
            f"{table(['checkpoint of ' + size(self.bytes), 'seconds', 'rate'], rows)}\n\n"
            f"save over torch.save {self.rate('save') / self.rate('torch.save'):.2f}, over torch.save and fsync "
            f"{self.rate('save') / self.rate('torch.save, fsync'):.2f}; load over torch.load "
            f"{self.rate('load') / self.rate('torch.load'):.2f}; an asynchronous save's pause is {pause:.1%} of a save"
        )


def measure_checkpoints(config: Config, *, cores: int, rounds: int) -> CheckpointTimes:
    """In a process of its own, in a temporary folder under run.dir."""
    Path(config.run.dir).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=config.run.dir) as folder:
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=_measure, args=(config, Path(folder), cores, rounds, theirs), daemon=True
        )
        process.start()
        theirs.close()
        try:
            return ours.recv()
        finally:
            process.kill()
            process.join()


def _measure(config: Config, folder: Path, cores: int, rounds: int, parent: Connection) -> None:
    from engine.build import build_trainer
    from engine.checkpoints import Checkpoints, Progress
    from engine.held import held_runs
    from engine.session import Session

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", OMP_NUM_THREADS=str(cores))
    torch.set_num_threads(cores)
    config.checkpoint.keep_last = 1
    plan = ParallelPlan.from_config(config, 1)
    with Session(config, plan, folder=folder) as session:
        trainer = build_trainer(
            config, plan, session.groups, streams=session.streams, device=session.device, num_micro_batches=1
        )
        checkpoints = Checkpoints(session, trainer, corpus_fingerprint="none")
        tensors = [tensor for run in held_runs(trainer) for tensor in run.tensors.values()]
        times = CheckpointTimes(sum(tensor.nbytes for tensor in tensors))
        step = 0

        def save(*, wait: bool) -> None:
            nonlocal step
            step += 1
            reports = checkpoints.save(Progress(step), wait=wait)
            assert all(report.error is None for report in reports), reports

        def torch_save(*, flush: bool) -> None:
            with (folder / "peer.pt").open("wb") as file:
                torch.save(tensors, file)
                if flush:
                    os.fsync(file.fileno())

        def timed(what: str, do: Callable[[], object]) -> None:
            os.sync()
            start = time.perf_counter()
            do()
            times.seconds.setdefault(what, []).append(time.perf_counter() - start)

        save(wait=False)  # makes the host copy, once
        checkpoints.finish()
        for _ in range(rounds):
            timed("save", lambda: save(wait=True))
            timed("torch.save", lambda: torch_save(flush=False))
            timed("torch.save, fsync", lambda: torch_save(flush=True))
            timed("pause of an asynchronous save", lambda: save(wait=False))
            checkpoints.finish()
            timed("load", lambda: checkpoints.load(checkpoints.newest_first()[0]))
            timed("torch.load", lambda: torch.load(folder / "peer.pt"))
    parent.send(times)
    parent.recv()  # stay until killed
