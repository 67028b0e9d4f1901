"""What every step and every rank measures, on real ranks: instructions, stragglers, recomputation, collectives."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conf.schema import Config, Recompute
from engine.collective_times import CollectiveTimes
from engine.device import this_device
from engine.first_steps import LAST
from engine.meters import Meters
from tests.engine.cases import tiny_config
from tests.engine.on_ranks import one_step, open_trainer
from tests.ranks import run_ranks
from tests.telemetry.reports import report

pytestmark = pytest.mark.alone

CPU = torch.device("cpu")


def seen(config: Config, *, slow_rank: int | None = None, steps: int = 2) -> list[Any]:
    """The reports of the first steps in which all ranks tell, rank `slow_rank` sleeping in each forward pass."""
    torch.set_num_threads(1)
    trainer, plan, groups, streams = open_trainer(config)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == slow_rank:
        trainer.module.register_forward_pre_hook(lambda *_: time.sleep(0.05))
    session: Any = SimpleNamespace(
        groups=groups, device=this_device(), plan=plan, rank=rank, hosts=["a", "b", "c", "d"], control=None
    )
    first: Any = SimpleNamespace(count=LAST, watch=lambda trainer: CollectiveTimes(groups, CPU))
    meters = Meters(session, first, interval=1, memory_before=0, ledger=())
    found = []
    for step in range(1, steps + 1):
        first.count += 1
        start = time.perf_counter()
        with meters.watch(trainer, step):
            one_step(trainer, plan, groups, streams, config, step)
        found.append(meters.see(report(step=step, step_time_s=time.perf_counter() - start)))
    return found


def test_a_slow_rank_is_named_although_its_peers_wait_for_it_in_every_collective() -> None:
    """The tensor ranks of a stage end their passes together: only without the collectives does one stand out."""
    config = tiny_config(parallel__tp=2, parallel__pp=2)
    ranks = run_ranks(4, lambda: seen(config, slow_rank=3), timeout_s=120)
    for reports in ranks:
        assert reports[-1].ranks.slowest.rank == 3 and reports[-1].ranks.slowest.host == "d"
        assert reports[-1].ranks.slowest.slowdown > 1.5
    metrics = ranks[0][-1].ranks.as_metrics()
    assert metrics["pipeline/imbalance"] > 1.2
    assert metrics["communication/tensor/all_reduce/seconds"] > 0
    assert {"ForwardPass", "BackwardPass", "OptimizerStep", "EndOfPasses"} <= ranks[0][-1].instructions.keys()


@pytest.mark.parametrize("stage", [1, 2])
def test_recomputation_is_about_a_forward_pass_and_nothing_without(stage: int) -> None:
    """Forward 1, backward 2 and the forward again 1: a quarter of the passes, where the head is small."""
    shape = dict(zero__stage=stage, model__num_layers=8)
    (plain,) = run_ranks(1, lambda: seen(tiny_config(**shape)))
    (again,) = run_ranks(1, lambda: seen(tiny_config(parallel__recompute=Recompute.full, **shape)))
    assert plain[-1].ranks.as_metrics()["pipeline/recompute_share"] == 0
    assert 0.1 < again[-1].ranks.as_metrics()["pipeline/recompute_share"] < 0.4
    assert plain[-1].ranks.as_metrics()["pipeline/bubble"] < 1e-3  # an instruction that has nothing to do


def both_ways(config: Config) -> tuple[Any, Any]:
    """(totals where calls stand, totals alone) of one step each."""
    trainer, plan, groups, streams = open_trainer(config)
    one_step(trainer, plan, groups, streams, config, 1)
    found = []
    for alone in (False, True):
        with CollectiveTimes(groups, CPU, alone=alone) as times:
            one_step(trainer, plan, groups, streams, config, 2)
        found.append(times.totals)
        dist.barrier()
    return found[0], found[1]


@pytest.mark.parametrize("changes", [dict(zero__stage=2), dict(zero__stage=3), dict(parallel__tp=2)], ids=str)
def test_calls_and_bytes_are_the_same_where_they_stand_and_alone(changes: dict[str, Any]) -> None:
    for standing, alone in run_ranks(2, lambda: both_ways(tiny_config(**changes)), timeout_s=120):
        assert {key: (one.calls, one.bytes) for key, one in standing.items()} == {
            key: (one.calls, one.bytes) for key, one in alone.items()
        }
        assert all(one.seconds > 0 and one.untimed == 0 for one in standing.values())


def test_nothing_of_it_stays_after_a_step() -> None:
    def methods() -> dict[str, Any]:
        return {name: value for name, value in vars(dist.ProcessGroup).items() if callable(value)}

    def around() -> bool:
        before = methods()
        with CollectiveTimes(SimpleNamespace(tensor=G, data=G, pipeline=G), CPU):  # type: ignore[arg-type]
            assert methods() != before
            dist.all_reduce(torch.ones(1))
        dist.all_gather_object([None, None], "x")
        return methods() == before

    G = SimpleNamespace(size=1, ranks=(0,))
    assert run_ranks(2, around) == [True, True]
