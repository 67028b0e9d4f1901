"""Rank <-> coordinate on the mesh, and which axis crosses nodes.

The usual axis order is Megatron-LM's: pipeline slowest, then data, tensor fastest, so that tensor ranks, which speak
most, are neighbours inside a node:  rank = (pp_rank * dp + dp_rank) * tp + tp_rank. Any other order can be planned and
run; ranks are placed on nodes in order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import product

AXES = ("pipe", "data", "tensor")


@dataclass(frozen=True)
class Spread:
    """Nodes that one group of ranks lies on, and its ranks on the node that has the fewest of them."""

    nodes: int
    ranks_per_node: int


@dataclass(frozen=True)
class Topology:
    """The mesh of pp x dp x tp ranks; `order`: its axes, the slowest first."""

    pp: int
    dp: int
    tp: int
    order: tuple[str, ...] = AXES

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    def size(self, axis: str) -> int:
        """Ranks along "pipe", "data" or "tensor"; ValueError for another name."""
        if axis not in AXES:
            raise ValueError(f"axis {axis} is not on the mesh; use one of {', '.join(AXES)}")
        return {"pipe": self.pp, "data": self.dp, "tensor": self.tp}[axis]

    def stride(self, axis: str) -> int:
        """Distance in global rank between neighbours along an axis."""
        stride = 1
        for faster in self.order[self.order.index(axis) + 1 :]:
            stride *= self.size(faster)
        return stride

    def coordinate(self, rank: int) -> tuple[int, int, int]:
        """(pp_rank, dp_rank, tp_rank); ValueError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank {rank} is outside a world of {self.world_size}; ranks are 0 to {self.world_size - 1}"
            )
        pp, dp, tp = (rank // self.stride(axis) % self.size(axis) for axis in AXES)
        return pp, dp, tp

    def rank(self, *, pp: int, dp: int, tp: int) -> int:
        """Global rank at a coordinate; ValueError outside the mesh."""
        places = {"pipe": pp, "data": dp, "tensor": tp}
        for name, place in places.items():
            if not 0 <= place < self.size(name):
                raise ValueError(
                    f"{name} rank {place} is outside an axis of {self.size(name)}; use 0 to {self.size(name) - 1}"
                )
        return sum(place * self.stride(axis) for axis, place in places.items())

    def lines(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Every group of ranks that differ along one axis ("pipe", "data" or "tensor") only, in axis order."""
        size, stride = self.size(axis), self.stride(axis)
        others = [name for name in AXES if name != axis]
        starts = (
            sum(place * self.stride(name) for name, place in zip(others, places, strict=True))
            for places in product(*(range(self.size(name)) for name in others))
        )
        return tuple(tuple(range(start, start + size * stride, stride)) for start in starts)

    def group_of(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that share `rank`'s line along an axis."""
        place = dict(zip(AXES, self.coordinate(rank), strict=True))[axis]
        first = rank - place * self.stride(axis)
        return tuple(range(first, first + self.size(axis) * self.stride(axis), self.stride(axis)))

    def crossing_axes(self, devices_per_node: int) -> tuple[str, ...]:
        """Axes of which some group has ranks on more than one node."""
        return tuple(axis for axis in AXES if self.spread(axis, devices_per_node).nodes > 1)

    @cache  # noqa: B019 - frozen and few
    def spread(self, axis: str, devices_per_node: int) -> Spread:
        """How the worst-placed group of an axis lies on nodes: over the most nodes, with the fewest ranks on one."""
        size, stride = self.size(axis), self.stride(axis)
        # Where a line lies in its first node decides how it goes on.
        starts = {
            (high + low) % devices_per_node
            for high in range(0, self.world_size, size * stride)
            for low in range(stride)
        }
        spreads = []
        for start in starts:
            on_node = Counter((start + place * stride) // devices_per_node for place in range(size))
            spreads.append(Spread(nodes=len(on_node), ranks_per_node=min(on_node.values())))
        return max(spreads, key=lambda spread: (spread.nodes, -spread.ranks_per_node))
