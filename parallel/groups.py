"""Process groups of the mesh: one `AxisGroup` an axis, opened once and passed down as an argument.

This is the only file of `parallel/` that needs torch.distributed. It is not a place for collectives
(`model.tensor_parallel.collectives`) nor for plan checks (`parallel.plan`). An axis of size 1 has no process group, so
code that holds an `AxisGroup` issues no collective there.

The order of ranks is the plan's (`parallel.topology`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from parallel.plan import ParallelPlan


@dataclass(frozen=True)
class AxisGroup:
    """The ranks that share one line of the mesh along one axis.

    `rank` is this process's place on the axis, `ranks` the global ranks in axis order; `process_group` is None exactly
    when `size` is 1.
    """

    name: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    process_group: dist.ProcessGroup | None


AXES = {"tensor": "tensor", "pipeline": "pipe", "data": "data"}  # field of Groups: axis of the topology
SINGLE = AxisGroup("tensor", 0, 1, (0,), None)


@dataclass(frozen=True)
class Groups:
    """This rank's line on each axis, and the whole world."""

    tensor: AxisGroup
    pipeline: AxisGroup
    data: AxisGroup
    world: AxisGroup

    @property
    def coordinate(self) -> tuple[int, int, int]:
        """(pipeline, data, tensor) ranks of this process."""
        return self.pipeline.rank, self.data.rank, self.tensor.rank


def open_groups(plan: ParallelPlan) -> Groups:
    """Open every group of the plan's mesh; a collective call: all ranks make it, in the same place.

    Needs torch.distributed initialised with `plan.world_size` ranks, or a world of one. Raises ValueError when the
    world that runs is not the one that was planned.
    """
    running = dist.get_world_size() if dist.is_initialized() else 1
    if running != plan.world_size:
        raise ValueError(f"{running} ranks run but the plan is for {plan.world_size}; start {plan.world_size} ranks")
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_group = dist.group.WORLD if plan.world_size > 1 else None
    return Groups(
        **{name: _open_axis(name, plan.topology.lines(axis), rank) for name, axis in AXES.items()},
        world=AxisGroup("world", rank, plan.world_size, tuple(range(plan.world_size)), world_group),
    )


def _open_axis(name: str, lines: tuple[tuple[int, ...], ...], rank: int) -> AxisGroup:
    """Open all lines of one axis (torch wants every rank in every `new_group` call) and keep this rank's."""
    mine: AxisGroup | None = None
    for ranks in lines:
        process_group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        if rank in ranks:
            mine = AxisGroup(name, ranks.index(rank), len(ranks), ranks, process_group)
    assert mine is not None
    return mine
