"""The simulated pipeline: the order of the real schedules; times of closed forms and of a longest path."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import networkx
import pytest
from deepspeed.runtime.pipe import schedule as deepspeed
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from engine.eager_schedule import EagerSchedule
from parallel.instructions import Exchange, Pass, instructions, rank_of
from parallel.states import in_flight
from parallel.timeline import StageTimes, Timeline, simulate

THEIRS = {
    "1f1b": deepspeed.TrainSchedule, "eager1f1b": EagerSchedule, "dualpipev": deepspeed.DualPipeVSchedule,
}  # fmt: skip
RUN = [
    (schedule, ranks, micro_batches)
    for schedule in THEIRS
    for ranks, micro_batches in [(1, 3), (2, 1), (2, 4), (3, 2), (3, 7), (4, 1), (4, 8), (4, 21), (7, 14), (8, 5)]
    if schedule != "dualpipev" or (ranks > 1 and micro_batches >= 2 * ranks)
]


def equal(stages: int, *, forward_s: float = 1.0, backward_s: float = 2.0, send_s: float = 0.0) -> list[StageTimes]:
    return [StageTimes(forward_s, backward_s, send_s)] * stages


def unequal(stages: int, generator: random.Random, *, send_s: float = 0.3) -> list[StageTimes]:
    draw = generator.uniform
    return [StageTimes(draw(0.5, 2), draw(1, 4), draw(0, send_s)) for _ in range(stages)]


def stages_of(schedule: str, ranks: int) -> int:
    return ranks * {"dualpipev": 2, "interleaved": 3}.get(schedule, 1)


def line(timeline: Timeline, rank: int) -> list[tuple[str, int, int]]:
    events = sorted((e for e in timeline.events if e.rank == rank), key=lambda e: (e.start_s, e.end_s))
    return [(event.kind, event.stage, event.micro_batch) for event in events]


def real_program(schedule: str, *, rank: int, ranks: int, micro_batches: int) -> list[list[tuple[str, int, int]]]:
    """What the class really gives: [kind, stage, micro-batch] of passes alone, and batches of sends and receives.

    Micro-batches are counted as they come: the buffers of TrainSchedule and EagerSchedule are reused in turn.
    """
    seen: Counter[tuple[str, int]] = Counter()
    program: list[list[tuple[str, int, int]]] = []
    queue: list[tuple[str, int, int]] = []
    for command in (command for step in THEIRS[schedule](micro_batches, ranks, rank) for command in step):
        name = type(command).__name__
        phase = getattr(command, "phase", 0)
        stage = rank if phase == 0 else 2 * ranks - 1 - rank
        if name == "CommitP2P":
            if queue:
                program.append(sorted(queue))
            queue = []
        elif name in ("ForwardPass", "BackwardPass", "SendActivation", "RecvActivation", "SendGrad", "RecvGrad"):
            item = (name, stage, seen[name, phase])
            seen[name, phase] += 1
            if name.endswith("Pass") or schedule != "dualpipev":
                program.append([item])
            else:
                queue.append(item)
    return program


def our_program(schedule: str, *, rank: int, ranks: int, micro_batches: int) -> list[list[tuple[str, int, int]]]:
    """The same of ours; a receive is named by the stage that receives, as theirs."""
    program = []
    for instruction in instructions(schedule, rank=rank, ranks=ranks, num_micro_batches=micro_batches):
        if isinstance(instruction, Pass):
            kind = "ForwardPass" if instruction.kind == "forward" else "BackwardPass"
            program.append([(kind, instruction.stage, instruction.micro_batch)])
        else:
            sends = [("Send", message, 0) for message in instruction.sends]
            receives = [("Recv", message, 1) for message in instruction.receives]
            program.append(
                sorted(
                    (
                        verb + ("Activation" if message.kind == "forward" else "Grad"),
                        message.stage + receiver * (1 if message.kind == "forward" else -1),
                        message.micro_batch,
                    )
                    for verb, message, receiver in sends + receives
                )
            )
    return program


@pytest.mark.parametrize(("schedule", "ranks", "micro_batches"), RUN)
def test_the_simulated_order_is_the_one_that_really_runs(schedule, ranks, micro_batches):
    generator = random.Random(f"{schedule}{ranks}{micro_batches}")
    for stages in (equal(stages_of(schedule, ranks)), unequal(stages_of(schedule, ranks), generator)):
        timeline = simulate(schedule, stages, ranks=ranks, num_micro_batches=micro_batches)
        for rank in range(ranks):
            theirs = real_program(schedule, rank=rank, ranks=ranks, micro_batches=micro_batches)
            kinds = {"ForwardPass": "forward", "BackwardPass": "backward"}
            run = [(kinds[name], stage, m) for ((name, stage, m), *_) in theirs if name in kinds]
            assert line(timeline, rank) == run


@pytest.mark.parametrize(("schedule", "ranks", "micro_batches"), [case for case in RUN if case[0] != "eager1f1b"])
def test_ranks_wait_for_each_other_where_deepspeeds_do(schedule, ranks, micro_batches):
    for rank in range(ranks):
        sizes = dict(rank=rank, ranks=ranks, micro_batches=micro_batches)
        assert our_program(schedule, **sizes) == real_program(schedule, **sizes)


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), [(2, 2, 4), (4, 2, 4), (4, 3, 20), (8, 4, 32)])
def test_the_interleaved_order_is_that_of_torchs_schedule(ranks, chunks, micro_batches):
    theirs = object.__new__(ScheduleInterleaved1F1B)  # its order needs no process group, its constructor does
    theirs.pp_group_size = theirs.microbatches_per_round = ranks
    theirs.n_local_stages, theirs._n_microbatches = chunks, micro_batches
    timeline = simulate("interleaved", equal(chunks * ranks), ranks=ranks, num_micro_batches=micro_batches)
    for rank in range(ranks):
        run = [action for action in theirs._calculate_single_rank_operations(rank) if action is not None]
        kinds = ["forward" if action.computation_type.name == "FORWARD" else "backward" for action in run]
        assert line(timeline, rank) == [(k, a.stage_index, a.microbatch_index) for k, a in zip(kinds, run, strict=True)]


@pytest.mark.parametrize(("schedule", "ranks", "micro_batches"), RUN)
def test_no_rank_holds_more_micro_batches_than_the_memory_ledger_counts(schedule, ranks, micro_batches):
    timeline = simulate(schedule, equal(stages_of(schedule, ranks)), ranks=ranks, num_micro_batches=micro_batches)
    stages = 2 if schedule == "dualpipev" else 1
    for rank in range(ranks):
        alive, most = 0, 0
        for kind, _, _ in line(timeline, rank):
            alive += 1 if kind == "forward" else -1
            most = max(most, alive)
        held = in_flight(rank, pp=ranks, num_micro_batches=micro_batches, schedule=schedule)
        assert held == -(-most // stages)


@pytest.mark.parametrize("schedule", ["1f1b", "eager1f1b", "gpipe"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 3), (2, 3), (4, 1), (4, 8), (8, 3), (16, 64)])
def test_equal_stages_idle_for_the_published_share(schedule, ranks, micro_batches):
    timeline = simulate(schedule, equal(ranks), ranks=ranks, num_micro_batches=micro_batches)
    for rank in range(ranks):
        assert timeline.bubble(rank) == pytest.approx((ranks - 1) / (micro_batches + ranks - 1), abs=1e-12)
    assert timeline.imbalance == pytest.approx(1)


def test_one_micro_batch_in_four_stages_idles_for_three_quarters():
    assert simulate("1f1b", equal(4), ranks=4, num_micro_batches=1).mean_bubble == 0.75  # case B6


@pytest.mark.parametrize(
    ("ranks", "chunks", "micro_batches"), [(2, 1, 2), (2, 2, 4), (4, 2, 4), (4, 3, 20), (8, 4, 32)]
)
def test_interleaving_divides_the_bubble_by_its_chunks(ranks, chunks, micro_batches):
    # arXiv:2104.04473 section 2.2: (p - 1) / (v m) of the ideal time, in which nobody waits.
    timeline = simulate("interleaved", equal(chunks * ranks), ranks=ranks, num_micro_batches=micro_batches)
    ideal_s = micro_batches * chunks * 3
    assert timeline.step_s / ideal_s - 1 == pytest.approx((ranks - 1) / (chunks * micro_batches), abs=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "eager1f1b", "dualpipev", "interleaved"])
def test_the_slowest_rank_sets_the_pace(schedule):
    stages = equal(stages_of(schedule, 4))
    stages[2] = StageTimes(1.5, 3.5)  # one and a half, and more
    short, long = (simulate(schedule, stages, ranks=4, num_micro_batches=m) for m in (40, 60))
    slowest = max(long.busy_s) / 60
    assert slowest == pytest.approx(3 * stages_of(schedule, 4) / 4 + 2)
    assert (long.step_s - short.step_s) / 20 == pytest.approx(slowest)
    assert long.imbalance == pytest.approx(max(long.busy_s) * 4 / sum(long.busy_s)) and long.imbalance > 1.05


def longest_path(schedule: str, stages: Sequence[StageTimes], ranks: int, micro_batches: int, overlap: object) -> float:
    """The step by a graph of dependencies: nodes are points in time, edges the least time between two of them."""
    graph = networkx.DiGraph()

    def after(earlier: object, later: object, seconds: float) -> None:
        old = graph.get_edge_data(earlier, later, {"weight": seconds})["weight"]
        graph.add_edge(earlier, later, weight=max(old, seconds))

    def link(message: Pass) -> float:
        lower = message.stage if message.kind == "forward" else message.stage - 1
        return stages[lower].send_s

    base = simulate(schedule, stages, ranks=ranks, num_micro_batches=micro_batches, overlap_sends=True)
    waits = schedule in ("1f1b", "gpipe", "dualpipev") and overlap is None
    posts: dict[Pass, list[object]] = {}
    commits: list[tuple[object, object, tuple[Pass, ...]]] = []
    for rank in range(ranks):
        if waits:
            program = instructions(schedule, rank=rank, ranks=ranks, num_micro_batches=micro_batches)
        else:
            program = [Pass(*pass_) for pass_ in line(base, rank)]
        free: object = "start"
        for n, instruction in enumerate(program):
            if isinstance(instruction, Exchange):
                done = ("through", rank, n)
                messages = instruction.sends + instruction.receives
                for message in messages:
                    posts.setdefault(message, []).append(free)
                commits.append((free, done, messages))
                free = done
                continue
            times = stages[instruction.stage]
            seconds = times.forward_s if instruction.kind == "forward" else times.backward_s
            begin, end = ("begin", *instruction), ("end", *instruction)
            after(free, begin, 0)
            after(begin, end, seconds)
            source = source_of(instruction, len(stages))
            if source is not None:
                crosses = rank_of(schedule, source.stage, ranks=ranks) != rank
                transfer = link(source) if crosses and not waits else 0
                after(("end", *source), begin, transfer)
                if schedule == "eager1f1b" and overlap is None:
                    after(free, begin, transfer)
            free = end
        after(free, "finish", 0)
    for free, done, messages in commits:
        after(free, done, 0)
        for message in messages:
            for post in posts[message]:
                after(post, done, link(message))
    return networkx.dag_longest_path_length(graph)


def source_of(pass_: Pass, stages: int) -> Pass | None:
    """Whose result a pass needs."""
    if pass_.kind == "forward":
        return pass_._replace(stage=pass_.stage - 1) if pass_.stage else None
    if pass_.stage == stages - 1:
        return pass_._replace(kind="forward")
    return pass_._replace(stage=pass_.stage + 1)


@pytest.mark.parametrize("overlap", [None, True])
@pytest.mark.parametrize("schedule", ["1f1b", "eager1f1b", "dualpipev", "gpipe", "interleaved"])
def test_a_step_lasts_as_long_as_the_longest_path_through_its_dependencies(schedule, overlap):
    generator = random.Random(f"{schedule}{overlap}")
    for ranks in (1, 2, 3, 5):
        if schedule == "dualpipev" and ranks == 1:
            continue
        micro_batches = ranks * generator.randint(2, 4) + (schedule != "interleaved") * generator.randint(0, 2)
        stages = unequal(stages_of(schedule, ranks), generator)
        simulated = simulate(
            schedule, stages, ranks=ranks, num_micro_batches=micro_batches, overlap_sends=overlap
        ).step_s
        assert simulated == pytest.approx(longest_path(schedule, stages, ranks, micro_batches, overlap), rel=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "eager1f1b", "dualpipev", "gpipe", "interleaved"])
def test_no_rank_runs_two_passes_at_once_and_each_pass_runs_once(schedule):
    stages = unequal(stages_of(schedule, 4), random.Random(4))
    timeline = simulate(schedule, stages, ranks=4, num_micro_batches=12)
    assert len({(e.stage, e.kind, e.micro_batch) for e in timeline.events}) == len(timeline.events) == 24 * len(stages)
    for rank in range(4):
        events = sorted((e for e in timeline.events if e.rank == rank), key=lambda e: e.start_s)
        assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(events))
        busy = sum(e.end_s - e.start_s for e in events)
        assert timeline.bubble(rank) == pytest.approx(1 - busy / timeline.step_s)


def test_a_transfer_that_is_waited_for_costs_two_stages_and_one_that_overlaps_only_the_receiver():
    # Two stages, one micro-batch: forward, transfer, forward, backward, transfer, backward.
    stages = [StageTimes(1, 2, 0.5), StageTimes(1, 2)]
    for overlap in (None, True):
        assert simulate("1f1b", stages, ranks=2, num_micro_batches=1, overlap_sends=overlap).step_s == 7
    # Many micro-batches: the last stage is held twice a micro-batch where it waits, and by nothing where it does not.
    held, free = (
        [simulate(schedule, stages, ranks=2, num_micro_batches=m, overlap_sends=o).step_s for m in (40, 60)]
        for schedule, o in (("1f1b", None), ("eager1f1b", True))
    )
    assert (held[1] - held[0]) / 20 == pytest.approx(3 + 2 * 0.5)
    assert (free[1] - free[0]) / 20 == pytest.approx(3)


@pytest.mark.parametrize(
    ("schedule", "stages", "ranks", "micro_batches", "line"),
    [
        ("1f1", 2, 2, 4, "schedule=1f1 is not known; use 1f1b, eager1f1b, dualpipev, gpipe, interleaved"),
        ("1f1b", 3, 2, 4, "1f1b has one stage a rank: 3 stages do not fit 2 ranks"),
        ("dualpipev", 4, 2, 3, "dualpipev needs 4 micro-batches (2 x ranks), not 3"),
        ("interleaved", 4, 2, 3, "interleaved: num_micro_batches=3 must be a multiple of 2 ranks"),
    ],
)
def test_what_a_schedule_cannot_run_is_refused_in_a_line(schedule, stages, ranks, micro_batches, line):
    with pytest.raises(ValueError) as refused:
        simulate(schedule, equal(stages), ranks=ranks, num_micro_batches=micro_batches)
    assert str(refused.value) == line
