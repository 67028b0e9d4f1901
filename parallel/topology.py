"""Rank <-> coordinate on the mesh, and which axis crosses nodes.

Axis order after Megatron-LM: pipeline slowest, then data, tensor fastest, so that tensor ranks, which speak most, are
neighbours inside a node:  rank = (pp_rank * dp + dp_rank) * tp + tp_rank.
"""

from __future__ import annotations

from dataclasses import dataclass

AXES = ("pipe", "data", "tensor")


@dataclass(frozen=True)
class Topology:
    """The mesh of pp x dp x tp ranks."""

    pp: int
    dp: int
    tp: int

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    def coordinate(self, rank: int) -> tuple[int, int, int]:
        """(pp_rank, dp_rank, tp_rank); ValueError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank {rank} is outside a world of {self.world_size}; ranks are 0 to {self.world_size - 1}"
            )
        return rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp

    def rank(self, *, pp: int, dp: int, tp: int) -> int:
        """Global rank at a coordinate; ValueError outside the mesh."""
        for name, place, size in (("pipe", pp, self.pp), ("data", dp, self.dp), ("tensor", tp, self.tp)):
            if not 0 <= place < size:
                raise ValueError(f"{name} rank {place} is outside an axis of {size}; use 0 to {size - 1}")
        return (pp * self.dp + dp) * self.tp + tp

    def lines(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Every group of ranks that differ along one axis ("pipe", "data" or "tensor") only, in axis order."""
        pps, dps, tps = range(self.pp), range(self.dp), range(self.tp)
        if axis == "tensor":
            return tuple(tuple(self.rank(pp=p, dp=d, tp=t) for t in tps) for p in pps for d in dps)
        if axis == "data":
            return tuple(tuple(self.rank(pp=p, dp=d, tp=t) for d in dps) for p in pps for t in tps)
        if axis == "pipe":
            return tuple(tuple(self.rank(pp=p, dp=d, tp=t) for p in pps) for d in dps for t in tps)
        raise ValueError(f"axis {axis} is not on the mesh; use one of {', '.join(AXES)}")

    def group_of(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that share `rank`'s line along an axis."""
        return next(line for line in self.lines(axis) if rank in line)

    def crossing_axes(self, devices_per_node: int) -> tuple[str, ...]:
        """Axes of which some group has ranks on more than one node, with ranks placed on nodes in order."""
        return tuple(
            axis
            for axis in AXES
            if any(len({rank // devices_per_node for rank in line}) > 1 for line in self.lines(axis))
        )
