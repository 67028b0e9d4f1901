"""What a collective costs on the links of a cluster: the alpha-beta model of ring and tree.

A ring moves 2 (g - 1) / g of the bytes in 2 (g - 1) messages, a double binary tree (NCCL 2.4) 2 of the bytes in
2 log2(g) messages; the cheaper one counts. A group that spans nodes is as fast as what leaves a node: the ports of all
its ranks there together, and never faster than the link inside. Pure Python. Not here: which collectives a plan makes
(`parallel.communication`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from conf.schema import ClusterConfig, LinkConfig
from parallel.topology import Spread, Topology


@dataclass(frozen=True)
class Link:
    """bandwidth: bytes/s that one device sends; latency_s: before the first byte of a message arrives."""

    name: str
    bandwidth: float
    latency_s: float


@dataclass(frozen=True)
class Fabric:
    """The links of a cluster. `inter_node` is None where there is one node."""

    devices_per_node: int
    intra_node: Link
    inter_node: Link | None

    @classmethod
    def from_config(cls, cluster: ClusterConfig, *, world_size: int) -> Fabric:
        """Raises ValueError where a link that is needed is not known."""
        per_node = cluster.devices_per_node or -(-world_size // cluster.nodes)
        several = world_size > per_node
        return cls(
            devices_per_node=per_node,
            intra_node=_known("intra_node", cluster.intra_node, cluster.name),
            inter_node=_known("inter_node", cluster.inter_node, cluster.name) if several else None,
        )

    def link(self, spread: Spread) -> Link:
        """The slowest link that a group spread like this travels, with what its ranks on one node send over it."""
        if spread.nodes == 1:
            return self.intra_node
        assert self.inter_node is not None
        outside = self.inter_node.bandwidth * spread.ranks_per_node
        inside = self.intra_node.bandwidth if spread.ranks_per_node > 1 else outside
        return Link(self.inter_node.name, min(outside, inside), self.inter_node.latency_s)

    def seconds(
        self, operation: str, number_of_bytes: float, *, topology: Topology, axis: str, group_size: int | None = None
    ) -> float:
        """Of one call. Bytes: of the whole tensor (all_gather: what is gathered; reduce_scatter: what is reduced).

        group_size: 2 for two ranks of a longer axis, which have a port each; None: the whole axis.
        """
        size = topology.size(axis)
        if size == 1:
            return 0.0
        pair = operation == "send_recv" or group_size == 2
        link = self.route(topology=topology, axis=axis, pair=pair)
        return collective_seconds(operation, number_of_bytes, group_size=2 if pair else size, link=link)

    def route(self, *, topology: Topology, axis: str, pair: bool) -> Link:
        """The slowest link of an axis's worst-placed group, or of two neighbours on it, which have a port each."""
        spread = topology.spread(axis, self.devices_per_node)
        return self.link(Spread(2, 1) if pair and spread.nodes > 1 else spread)


def collective_seconds(operation: str, number_of_bytes: float, *, group_size: int, link: Link) -> float:
    """alpha-beta time of one call; see the head of this file."""
    bytes_s = number_of_bytes / link.bandwidth
    return min(messages * link.latency_s + share * bytes_s for messages, share in ways(operation, group_size))


def ways(operation: str, group_size: int) -> tuple[tuple[float, float], ...]:
    """(messages one after the other, bytes sent over the bytes of the tensor) of each algorithm: ring, then tree."""
    hops, share, levels = group_size - 1, (group_size - 1) / group_size, log2(group_size)
    if operation == "send_recv":
        return ((1, 1),)
    if operation in ("all_gather", "reduce_scatter"):
        return ((hops, share),)
    if operation == "broadcast":
        return (hops, 1), (levels, 1)
    assert operation == "all_reduce", operation
    return (2 * hops, 2 * share), (2 * levels, 2)


def _known(name: str, link: LinkConfig, cluster: str) -> Link:
    if link.bandwidth is None or link.latency_s is None:
        raise ValueError(
            f"cluster.{name} of cluster={cluster} has no bandwidth and latency_s; measure them with recipes/probe.py, "
            "or choose a cluster that has them"
        )
    return Link(link.name or name, link.bandwidth, link.latency_s)
