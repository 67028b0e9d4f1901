"""Process groups: who shares which axis, for the rank order pipeline, data, tensor (fastest)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel.groups import AxisGroup, open_groups
from parallel.topology import Topology
from tests.ranks import RankError, run_ranks


def plan(pp: int, dp: int, tp: int) -> Any:
    return SimpleNamespace(topology=Topology(pp=pp, dp=dp, tp=tp), world_size=pp * dp * tp)


def run_groups(pp: int, dp: int, tp: int) -> Any:
    groups = open_groups(plan(pp, dp, tp))
    rank = dist.get_rank() if dist.is_initialized() else 0
    sums = {}
    axes: tuple[AxisGroup, ...] = (groups.tensor, groups.pipeline, groups.data, groups.world)
    for axis in axes:
        assert axis.ranks[axis.rank] == rank and len(axis.ranks) == axis.size
        assert (axis.process_group is None) == (axis.size == 1)
        value = torch.tensor(10.0**rank)
        if axis.process_group is not None:
            dist.all_reduce(value, group=axis.process_group)
        sums[axis.name] = int(value.item())
    return groups.coordinate, sums


def test_rank_order_is_pipeline_data_tensor() -> None:
    results = run_ranks(8, run_groups, 2, 2, 2)
    for rank, ((p, d, t), sums) in enumerate(results):
        assert rank == (p * 2 + d) * 2 + t
        assert sums["tensor"] == sum(10 ** ((p * 2 + d) * 2 + i) for i in range(2))
        assert sums["data"] == sum(10 ** ((p * 2 + i) * 2 + t) for i in range(2))
        assert sums["pipeline"] == sum(10 ** ((i * 2 + d) * 2 + t) for i in range(2))
        assert sums["world"] == 11111111


def test_axes_of_size_one_have_no_process_group() -> None:
    assert run_ranks(1, run_groups, 1, 1, 1) == [((0, 0, 0), {"tensor": 1, "pipeline": 1, "data": 1, "world": 1})]
    assert [coordinate for coordinate, _ in run_ranks(2, run_groups, 1, 2, 1)] == [(0, 0, 0), (0, 1, 0)]


def test_a_world_that_was_not_planned_is_refused() -> None:
    with pytest.raises(RankError, match="2 ranks run but the plan is for 4; start 4 ranks"):
        run_ranks(2, run_groups, 1, 2, 2)


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the broken one")
    dist.barrier()


def test_the_harness_hands_a_ranks_traceback_to_the_parent() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1.*in fail_on_rank_one.*the broken one"):
        run_ranks(2, fail_on_rank_one)


def hang_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def test_the_harness_kills_ranks_that_hang() -> None:
    with pytest.raises(RankError, match=r"ranks \[0.*\] ended, or were killed after 2 s"):
        run_ranks(2, hang_on_rank_zero, timeout_s=2.0)
