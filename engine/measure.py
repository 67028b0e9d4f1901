"""Programs that train, side by side: each in its own set of spawned ranks, taking turns, step by step on one clock.

A contender is opened once and waits, idle, for its turns: A warms up, B warms up, then rounds of A B, B A, ... so that
a machine that slows down slows all of them. Ranks of one machine share CLOCK_MONOTONIC; a step ends with its last rank.
Not here: what the contenders are (engine/contenders.py, engine/peers*.py), ratios and tables (engine/comparison.py).
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from statistics import median

import numpy as np
import torch

from conf.schema import Config
from corpus.batches import Batch, micro_batches
from corpus.dataset import Sample
from engine.device import Device, keep_freed_memory, matmul_rate, this_device
from engine.distributed import free_port
from parallel.plan import ParallelPlan

Step = Callable[[Sequence[Batch]], float]  # this data rank's micro-batches -> loss of the step (nan: not on this rank)


@dataclass(frozen=True)
class Contender:
    """A program to measure. `open(config, plan)` is called on each of its ranks, with RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT set; it joins the process group itself where it has more than one rank."""

    name: str
    config: Config
    ranks: int
    open: Callable[[Config, ParallelPlan], Step]


@dataclass
class Measurement:
    """step_times_s: of each measured step; cpu_s: process time of all ranks over those steps; losses: of all steps from
    the first warm-up step on; peak_bytes: of each rank; memory_limit: bytes that a rank may use."""

    step_times_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    losses: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    memory_limit: int = 0


@dataclass(frozen=True)
class _Turn:
    """What one rank answers: when each step ended (first entry: when the turn began), and what it used."""

    times_s: list[float]
    cpu_s: float
    losses: list[float]
    peak_bytes: int
    memory_limit: int


class SkewedTokens:
    """Random tokens of which small ids are far more frequent, so that a model has something to learn."""

    def __init__(self, *, vocab_size: int, sequence_length: int, seed: int):
        self.vocab_size, self.sequence_length, self.seed = vocab_size, sequence_length, seed

    def __len__(self) -> int:
        return 2**62

    def sample(self, index: int) -> Sample:
        random = np.random.default_rng((self.seed, index)).random(self.sequence_length + 1)
        tokens = (self.vocab_size * random**4).astype(np.int64)
        return Sample(tokens, np.arange(self.sequence_length), None)


class ContenderError(RuntimeError):
    """A rank of a contender failed; the message holds its traceback."""


class Ranks:
    """The open processes of one contender; use as a context manager."""

    def __init__(self, contender: Contender, *, cores: int):
        self.contender = contender
        self.result = Measurement()
        context = multiprocessing.get_context("spawn")
        port, threads = free_port(), max(1, cores // contender.ranks)
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for rank in range(contender.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(contender, rank, threads, port, theirs), name=contender.name, daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()  # nothing to save, and a peer may wait in a collective
        for process in self.processes:
            process.join()

    def wait_until_open(self) -> None:
        """Raises ContenderError where a rank failed to open."""
        self._answers()

    def take_turn(self, steps: int, *, measured: bool) -> None:
        """Train `steps` steps on every rank."""
        for pipe in self.pipes:
            pipe.send(steps)
        turns = self._answers()
        first_rank = max(turns, key=lambda turn: sum(loss == loss for loss in turn.losses))  # one that knows the loss
        self.result.losses += first_rank.losses
        self.result.peak_bytes = [turn.peak_bytes for turn in turns]
        self.result.memory_limit = min(turn.memory_limit for turn in turns)
        if measured:
            ends = [max(times) for times in zip(*(turn.times_s for turn in turns), strict=True)]
            self.result.step_times_s += [end - start for start, end in pairwise(ends)]
            self.result.cpu_s += sum(turn.cpu_s for turn in turns)

    def _answers(self) -> list[_Turn]:
        answers = []
        for rank, pipe in enumerate(self.pipes):
            try:
                answer = pipe.recv()
            except EOFError:
                answer = "the process died without an answer"
            if isinstance(answer, str):
                raise ContenderError(f"rank {rank} of {self.contender.name} failed:\n{answer}")
            answers.append(answer)
        return answers


def _follow_parent() -> None:
    """End this rank when the process that spawned it is gone, also in the middle of a step."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _rank_main(contender: Contender, rank: int, threads: int, port: int, parent: Connection) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(contender.ranks), LOCAL_WORLD_SIZE=str(contender.ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS=str(threads),
    )  # fmt: skip
    threading.Thread(target=_follow_parent, daemon=True).start()
    try:
        torch.set_num_threads(threads)
        if this_device().kind == "cpu":
            keep_freed_memory()  # for every contender: none may win by another allocator setting
        config, device = contender.config, this_device()
        plan = ParallelPlan.from_config(config, contender.ranks)
        _, data_rank, _ = plan.coordinate(rank)
        dataset = SkewedTokens(
            vocab_size=config.model.vocab_size, sequence_length=config.data.sequence_length, seed=config.seed
        )
        step = contender.open(config, plan)
        limit = device.memory_per_rank()
        parent.send(_Turn([], 0.0, [], 0, limit))
        done = 0
        while (count := parent.recv()) > 0:
            batches = [
                micro_batches(dataset, plan=plan, first_sample=i * plan.global_batch_size, data_rank=data_rank)
                for i in range(done, done + count)
            ]
            times, cpu_s, losses = [device.now()], time.process_time(), []
            for of_step in batches:
                losses.append(step(of_step))
                times.append(device.now())
            cpu_s = time.process_time() - cpu_s
            done += count
            parent.send(_Turn(times, cpu_s, losses, device.peak_memory_bytes(), limit))
    except EOFError:
        return  # the parent is gone
    except BaseException:
        parent.send(traceback.format_exc())


class MatmulRate:
    """What a matrix product reaches on this process's threads, measured again and again between turns. FLOP/s."""

    def __init__(self, device: Device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self.all: list[float] = []

    def measure(self) -> None:
        self.all.append(matmul_rate(self.device, self.dtype, seconds=0.2))

    @property
    def median(self) -> float:
        return median(self.all)


def compare(
    contenders: Sequence[Contender],
    *,
    cores: int,
    warmup_steps: int,
    steps: int,
    rounds: int,
    between: Callable[[str], None] = lambda message: None,
) -> dict[str, Measurement]:
    """Measure contenders in turns; measurements by name, in the given order.

    `between(message)` is called before each turn, while all contenders are idle. Raises ContenderError.
    """
    opened: list[Ranks] = []
    try:
        for contender in contenders:
            between(f"starting {contender.name}")
            opened.append(Ranks(contender, cores=cores))
            opened[-1].wait_until_open()
        for ranks in opened:
            between(f"warming up {ranks.contender.name}")
            ranks.take_turn(warmup_steps, measured=False)
        for number in range(rounds):
            for ranks in opened if number % 2 == 0 else reversed(opened):
                between(f"round {number + 1} of {rounds}: {ranks.contender.name}")
                ranks.take_turn(steps, measured=True)
    finally:
        for ranks in opened:
            ranks.__exit__()
    return {ranks.contender.name: ranks.result for ranks in opened}
