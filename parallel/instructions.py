"""What each pipeline rank runs in one optimizer step, in order: forward and backward passes, and its waits for peers.

1f1b follows DeepSpeed's TrainSchedule, dualpipev its DualPipeVSchedule (arXiv:2412.19437's V), eager1f1b
`engine.eager_schedule` (arXiv:2211.05322), gpipe arXiv:1811.06965, interleaved Megatron's order (arXiv:2104.04473).
Not here: how long anything takes (`parallel.timeline`). Tests hold these orders against the classes that really run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

SCHEDULES = ("1f1b", "eager1f1b", "dualpipev", "gpipe", "interleaved")
# Run by DeepSpeed's own point-to-point calls, in which sender and receiver wait for each other.
WAITING = ("1f1b", "dualpipev", "gpipe")


class Pass(NamedTuple):
    """A pass of one micro-batch through one stage; as a message, what it hands to the next stage of its direction."""

    kind: str  # "forward" or "backward"
    stage: int
    micro_batch: int

    @property
    def link(self) -> int:
        """The link its result travels, named by the stage above it: a gradient returns where its activation came."""
        return self.stage - (self.kind == "backward")


class Exchange(NamedTuple):
    """Sends and receives launched as one; the rank goes on when all of them are through."""

    sends: tuple[Pass, ...]
    receives: tuple[Pass, ...]


def rank_of(schedule: str, stage: int, *, ranks: int) -> int:
    """The pipeline rank that holds a stage: dualpipev folds them into a V, interleaved deals them out in turn."""
    if schedule == "dualpipev":
        return min(stage, 2 * ranks - 1 - stage)
    return stage % ranks


def source(this: Pass, *, stages: int) -> Pass | None:
    """The pass whose result a pass needs; None for the first stage's forward."""
    if this.kind == "forward":
        return Pass("forward", this.stage - 1, this.micro_batch) if this.stage else None
    if this.stage == stages - 1:
        return Pass("forward", this.stage, this.micro_batch)
    return Pass("backward", this.stage + 1, this.micro_batch)


def check(schedule: str, *, stages: int, ranks: int, num_micro_batches: int) -> None:
    """Refuse what the schedule cannot run."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule} is not known; use {', '.join(SCHEDULES)}")
    if min(stages, ranks, num_micro_batches) < 1:
        raise ValueError(f"stages={stages}, ranks={ranks} and num_micro_batches={num_micro_batches} must be positive")
    if schedule == "interleaved":
        if stages % ranks:
            raise ValueError(f"interleaved: {ranks} ranks do not divide {stages} stages; use {ranks} x chunks stages")
        if num_micro_batches % ranks:
            raise ValueError(f"interleaved: num_micro_batches={num_micro_batches} must be a multiple of {ranks} ranks")
    elif stages != ranks * (2 if schedule == "dualpipev" else 1):
        each = "two stages" if schedule == "dualpipev" else "one stage"
        raise ValueError(f"{schedule} has {each} a rank: {stages} stages do not fit {ranks} ranks")
    if schedule == "dualpipev" and num_micro_batches < 2 * ranks:
        raise ValueError(f"dualpipev needs {2 * ranks} micro-batches (2 x ranks), not {num_micro_batches}")


def passes(schedule: str, *, rank: int, ranks: int, num_micro_batches: int, stages: int) -> list[Pass]:
    """The passes of one rank, in order."""
    if schedule == "interleaved":
        return _interleaved(rank, ranks, num_micro_batches, stages)
    program = instructions(schedule, rank=rank, ranks=ranks, num_micro_batches=num_micro_batches)
    return [instruction for instruction in program if isinstance(instruction, Pass)]


def instructions(schedule: str, *, rank: int, ranks: int, num_micro_batches: int) -> list[Pass | Exchange]:
    """Passes and, for the schedules in WAITING, exchanges of one rank, in order."""
    programs: dict[str, Callable[[int, int, int], Iterator[Pass | Exchange]]] = {
        "1f1b": _one_forward_one_backward, "eager1f1b": _eager, "gpipe": _gpipe,
    }  # fmt: skip
    if schedule == "dualpipev":
        return _DualPipeV(rank, ranks, num_micro_batches).program
    return list(programs[schedule](rank, ranks, num_micro_batches))


def _send(kind: str, stage: int, micro_batch: int) -> Exchange:
    return Exchange((Pass(kind, stage, micro_batch),), ())


def _receive(kind: str, stage: int, micro_batch: int) -> Exchange:
    return Exchange((), (Pass(kind, stage, micro_batch),))


def _one_forward_one_backward(rank: int, ranks: int, num_micro_batches: int) -> Iterator[Pass | Exchange]:
    """DeepSpeed's clock: forward m at tick rank + 2 m, backward m at tick 2 ranks - 1 - rank + 2 m.

    What a tick computed is sent at the start of the next one; neighbours exchange the gradient before the activation.
    """
    first, last = rank == 0, rank == ranks - 1
    for tick in range(2 * (num_micro_batches + ranks - 1) + 1):
        is_forward = tick % 2 == rank % 2
        forward, backward = (tick - rank) // 2, (tick - (2 * ranks - 1 - rank)) // 2
        if is_forward:
            if 0 <= backward < num_micro_batches and not first:
                yield _send("backward", rank, backward)
            if 0 <= forward < num_micro_batches:
                if not first:
                    yield _receive("forward", rank - 1, forward)
                yield Pass("forward", rank, forward)
        else:
            if 0 <= backward < num_micro_batches and not last:
                yield _receive("backward", rank + 1, backward)
            if 0 <= forward < num_micro_batches and not last:
                yield _send("forward", rank, forward)
            if 0 <= backward < num_micro_batches:
                yield Pass("backward", rank, backward)


def _eager(rank: int, ranks: int, num_micro_batches: int) -> Iterator[Pass]:
    """2 (ranks - rank) - 1 forwards, then backward and forward in turn."""
    ahead = min(2 * (ranks - rank) - 1, num_micro_batches)
    for micro_batch in range(ahead):
        yield Pass("forward", rank, micro_batch)
    for micro_batch in range(num_micro_batches):
        yield Pass("backward", rank, micro_batch)
        if micro_batch + ahead < num_micro_batches:
            yield Pass("forward", rank, micro_batch + ahead)


def _gpipe(rank: int, ranks: int, num_micro_batches: int) -> Iterator[Pass | Exchange]:
    """All forwards, then all backwards."""
    first, last = rank == 0, rank == ranks - 1
    for micro_batch in range(num_micro_batches):
        if not first:
            yield _receive("forward", rank - 1, micro_batch)
        yield Pass("forward", rank, micro_batch)
        if not last:
            yield _send("forward", rank, micro_batch)
    for micro_batch in range(num_micro_batches):
        if not last:
            yield _receive("backward", rank + 1, micro_batch)
        yield Pass("backward", rank, micro_batch)
        if not first:
            yield _send("backward", rank, micro_batch)


def _interleaved(rank: int, ranks: int, num_micro_batches: int, stages: int) -> list[Pass]:
    """Megatron's forward_backward_pipelining_with_interleaving: chunks in turn, `ranks` micro-batches of each."""
    chunks = stages // ranks
    total = num_micro_batches * chunks
    warm_up = min(total, 2 * (ranks - rank - 1) + (chunks - 1) * ranks)

    def nth(kind: str, n: int) -> Pass:
        chunk = n % (ranks * chunks) // ranks
        chunk = chunk if kind == "forward" else chunks - 1 - chunk
        return Pass(kind, chunk * ranks + rank, n // (ranks * chunks) * ranks + n % ranks)

    order = [nth("forward", n) for n in range(warm_up)]
    for n in range(total):
        if warm_up + n < total:
            order.append(nth("forward", warm_up + n))
        order.append(nth("backward", n))
    return order


class _DualPipeV:
    """The program of DeepSpeed's DualPipeVSchedule, chunk by chunk; what is queued travels at the next commit."""

    def __init__(self, rank: int, ranks: int, num_micro_batches: int):
        self.stages = (rank, 2 * ranks - 1 - rank)
        # Where each pass's input comes from, and its result goes, by kind and phase; None: not to another rank.
        self.sources = {
            (kind, phase): self._elsewhere(stage - step, ranks)
            for kind, step in (("forward", 1), ("backward", -1))
            for phase, stage in enumerate(self.stages)
        }
        self.leaves = {
            (kind, phase): self._elsewhere(stage + step, ranks) is not None
            for kind, step in (("forward", 1), ("backward", -1))
            for phase, stage in enumerate(self.stages)
        }
        self.program: list[Pass | Exchange] = []
        self.sends: list[Pass] = []
        self.receives: list[Pass] = []
        self.counts: dict[tuple[str, str, int], int] = {}
        self._run(rank, ranks, num_micro_batches)

    def _run(self, rank: int, ranks: int, num_micro_batches: int) -> None:
        below = ranks - rank - 1
        for _ in range(2 * below):
            self._chunk(("forward", 0))
        self._receive("forward", 0)
        for i in range(rank + 1):
            self._commit()
            self._compute("forward", 0)
            self._receive("forward", 0)
            self._chunk(("forward", 1), send=below > 0 or i < rank)
            self._send("forward", 0)
        for _ in range(below):
            self._chunk(("backward", 1))
            self._receive("forward", 1)
            self._commit()
            self._chunk(("forward", 1), receive=False)
        for i in range(num_micro_batches - 2 * ranks + rank + 1):
            if i == 0 and below == 0:
                self._commit()
                self._compute("forward", 0)
                self._send("forward", 1)
                self._chunk(("backward", 1), send=False)
                self._send("forward", 0)
                self._send("backward", 1)
            else:
                self._pair(0, 1, receive=i > 0)
            self._pair(1, 0)
        for _ in range(below):
            self._chunk(("backward", 1))
            self._pair(1, 0)
        for _ in range(rank + 1):
            self._chunk(("backward", 1))
            self._chunk(("backward", 0))
        for _ in range(below):
            self._commit()
            self._chunk(("backward", 0))
        self._commit()

    def _pair(self, forward: int, backward: int, *, receive: bool = True) -> None:
        """A forward of one stage and a backward of the other; `receive`: the forward's input is not on its way yet."""
        if receive:
            self._receive("forward", forward)
        self._receive("backward", backward)
        self._commit()
        self._compute("forward", forward)
        self._compute("backward", backward)
        self._send("forward", forward)
        self._send("backward", backward)

    def _chunk(self, pass_: tuple[str, int], *, receive: bool = True, send: bool = True) -> None:
        if receive:
            self._receive(*pass_)
        self._commit()
        self._compute(*pass_)
        if send:
            self._send(*pass_)

    def _compute(self, kind: str, phase: int) -> None:
        self.program.append(Pass(kind, self.stages[phase], self._next("compute", kind, phase)))

    def _send(self, kind: str, phase: int) -> None:
        if self.leaves[kind, phase]:
            self.sends.append(Pass(kind, self.stages[phase], self._next("send", kind, phase)))

    def _receive(self, kind: str, phase: int) -> None:
        stage = self.sources[kind, phase]
        if stage is not None:
            self.receives.append(Pass(kind, stage, self._next("receive", kind, phase)))

    def _elsewhere(self, stage: int, ranks: int) -> int | None:
        """A neighbouring stage, where there is one and another rank holds it: the V turns on the last rank."""
        return stage if 0 <= stage < 2 * ranks and stage not in self.stages else None

    def _commit(self) -> None:
        if self.sends or self.receives:
            self.program.append(Exchange(tuple(self.sends), tuple(self.receives)))
            self.sends, self.receives = [], []

    def _next(self, action: str, kind: str, phase: int) -> int:
        key = (action, kind, phase)
        self.counts[key] = self.counts.get(key, -1) + 1
        return self.counts[key]
