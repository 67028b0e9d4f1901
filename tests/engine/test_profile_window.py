"""Profiled steps leave traces with the instructions and collectives of exactly these steps; other steps leave none."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from engine.profile_window import ProfileWindow
from telemetry.trace_overlap import Profiled
from tests.engine.cases import tiny_config
from tests.engine.on_ranks import one_step, open_trainer
from tests.ranks import run_ranks

MICRO_BATCHES = 4


def profiled_steps(
    folder: Path, windows: list[tuple[int, int]], ranks: list[int] | None, order: list[int]
) -> tuple[dict[int, Profiled], list[int]]:
    """({step: what its window left}, steps in which a profiler ran) of this rank, over steps in `order`."""
    config = tiny_config(parallel__pp=2, train__global_batch_size=MICRO_BATCHES)
    trainer, plan, groups, streams = open_trainer(config)
    session: Any = SimpleNamespace(
        plan=plan, rank=dist.get_rank(), control=dist.group.WORLD, folder=folder, device=SimpleNamespace(kind="cpu")
    )
    profile = ProfileWindow(session, windows, ranks)
    left, seen = {}, []
    for step in order:
        with profile.watch(trainer, step), trainer.clock:
            if torch.autograd.profiler._is_profiler_enabled:
                seen.append(step)
            assert (trainer.clock.annotate is nullcontext) == (step not in seen)
            one_step(trainer, plan, groups, streams, config, step)
        assert trainer.clock.annotate is nullcontext and trainer.clock.totals["ForwardPass"] > 0
        found = profile.end(step)
        if found is not None:
            left[step] = found
    dist.barrier()
    return left, seen


def events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]


def names(path: Path, category: str) -> Counter[str]:
    return Counter(event["name"] for event in events(path) if event.get("cat") == category)


def test_a_window_holds_instructions_and_collectives_of_its_steps_and_of_no_other(tmp_path: Path) -> None:
    found = run_ranks(2, profiled_steps, tmp_path, [(2, 3), (5, 5)], None, [1, 2, 3, 4, 5, 6], timeout_s=180)
    for left, seen in found:
        assert seen == [2, 3, 5], "outside its windows no profiler runs and no instruction is annotated"
        assert {step: one.steps for step, one in left.items()} == {3: "steps 2 to 3", 5: "step 5"}
        assert left[3].overlaps == {} and "no GPU kernels" in left[3].reasons[0]
    left = found[0][0]
    assert left[3].paths == {rank: f"traces/rank-{rank}-steps-2-3.pt.trace.json.gz" for rank in (0, 1)}
    for rank, (sends, receives) in enumerate((("SendActivation", "RecvGrad"), ("SendGrad", "RecvActivation"))):
        for last, steps in ((3, (2, 3)), (5, (5,))):
            counts = names(tmp_path / left[last].paths[rank], "user_annotation")
            assert {name for name in counts if name.startswith("ProfilerStep")} == {f"ProfilerStep#{s}" for s in steps}
            for name in ("ForwardPass", "BackwardPass", sends, receives):
                assert counts[name] == MICRO_BATCHES * len(steps), name
            assert counts["OptimizerStep"] == counts["EndOfPasses"] == len(steps)
            assert min(counts["gloo:send"], counts["gloo:recv"], counts["gloo:all_reduce"]) > 0
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == sorted(
        Path(path).name for one in left.values() for path in one.paths.values()
    ), "no half trace is left"


def test_instructions_stand_inside_their_step(tmp_path: Path) -> None:
    run_ranks(2, profiled_steps, tmp_path, [(2, 2)], [1], [1, 2], timeout_s=180)
    [path] = (tmp_path / "traces").iterdir()
    assert path.name == "rank-1-steps-2.pt.trace.json.gz", "telemetry.profile.ranks=[1] keeps that rank's alone"
    marked = [event for event in events(path) if event.get("cat") == "user_annotation"]
    [step] = [event for event in marked if event["name"] == "ProfilerStep#2"]
    forward = [event for event in marked if event["name"] == "ForwardPass"]
    assert all(step["ts"] <= one["ts"] and one["ts"] + one["dur"] <= step["ts"] + step["dur"] for one in forward)


def test_a_window_that_a_rollback_cuts_short_is_recorded_when_it_comes_again(tmp_path: Path) -> None:
    for left, _ in run_ranks(2, profiled_steps, tmp_path, [(2, 3)], [0], [1, 2, 1, 2, 3], timeout_s=180):
        assert list(left) == [3]
    [path] = (tmp_path / "traces").iterdir()
    assert names(path, "user_annotation")["OptimizerStep"] == 2


def test_a_trace_that_a_full_disk_refuses_is_told_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "traces").write_text("a file where the folder should be")
    [(left, _), _] = run_ranks(2, profiled_steps, tmp_path, [(1, 1)], [0], [1, 2], timeout_s=180)
    assert left[1].paths == {} and "cannot be written" in left[1].reasons[0]
