"""Collectives on links, against rings and trees that are run message by message."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import ClusterConfig, LinkConfig
from parallel.links import Fabric, Link, collective_seconds
from parallel.topology import Spread, Topology

NVLINK, IB = Link("NVLink", 100e9, 5e-6), Link("InfiniBand", 10e9, 20e-6)
FABRIC = Fabric(8, NVLINK, IB)


def ring(chunks: list[list[set[int]]], *, reduces: bool, gathers: bool) -> list[int]:
    """Ranks in a ring pass chunks on until the operation is done; chunks that each rank has sent, step by step.

    chunks[rank][chunk]: whose parts of it the rank has added up. Every step each rank sends one chunk to the next.
    """
    size, steps = len(chunks), []
    first = 0
    for phase in [1] * reduces + [0] * gathers:
        for step in range(size - 1):
            outgoing = [(rank, (rank - step + (0 if phase or not reduces else 1)) % size) for rank in range(size)]
            values = [set(chunks[rank][chunk]) for rank, chunk in outgoing]
            for (rank, chunk), value in zip(outgoing, values, strict=True):
                receiver = chunks[(rank + 1) % size]
                receiver[chunk] = receiver[chunk] | value if phase else value
            steps.append(1)
            first += 1
    return steps


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_an_all_reduce_takes_a_ring_so_many_steps_of_one_chunk(size):
    everyone = set(range(size))
    chunks = [[{rank} for _ in range(size)] for rank in range(size)]
    steps = ring(chunks, reduces=True, gathers=True)
    assert all(chunk == everyone for rank in chunks for chunk in rank), "every rank has the whole sum"
    number_of_bytes = 8e9  # so large that a ring is cheaper than a tree
    by_hand = sum(IB.latency_s + sent * number_of_bytes / size / IB.bandwidth for sent in steps)
    assert collective_seconds("all_reduce", number_of_bytes, group_size=size, link=IB) == pytest.approx(by_hand)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_reduce_scatter_and_all_gather_are_the_halves_of_a_rings_all_reduce(size):
    scattered = [[{rank} for _ in range(size)] for rank in range(size)]
    steps = ring(scattered, reduces=True, gathers=False)
    assert all(any(len(chunk) == size for chunk in rank) for rank in scattered)
    held = [[{0} if chunk == rank else set() for chunk in range(size)] for rank in range(size)]
    assert len(ring(held, reduces=False, gathers=True)) == len(steps) and all(all(rank) for rank in held)
    for operation in ("reduce_scatter", "all_gather"):
        by_hand = sum(IB.latency_s + sent * 1e6 / size / IB.bandwidth for sent in steps)
        assert collective_seconds(operation, 1e6, group_size=size, link=IB) == pytest.approx(by_hand)


@pytest.mark.parametrize(("size", "depth"), [(2, 1), (4, 2), (16, 4), (64, 6)])
def test_a_small_all_reduce_goes_up_a_tree_and_down_again(size, depth):
    """Ranks pair up until one has the sum; then the same way back."""
    holders, rounds = size, 0
    while holders > 1:
        holders, rounds = (holders + 1) // 2, rounds + 1
    assert rounds == depth
    assert collective_seconds("all_reduce", 0, group_size=size, link=IB) == pytest.approx(2 * rounds * IB.latency_s)


def test_large_messages_come_to_the_bandwidth_and_small_ones_to_the_latency():
    link = Link("a", 1e9, 1e-5)
    for size in (2, 8, 1024):
        large = collective_seconds("all_reduce", 1e15, group_size=size, link=link) * 1e9 / 1e15
        assert large == pytest.approx(2 * (size - 1) / size, rel=1e-3)
    assert collective_seconds("send_recv", 1, group_size=2, link=link) == pytest.approx(1e-5 + 1e-9)
    assert collective_seconds("broadcast", 0, group_size=8, link=link) == pytest.approx(3e-5)


@given(
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send_recv"]),
    st.integers(2, 64), st.floats(0, 1e12), st.floats(1, 10),
)  # fmt: skip
def test_more_bytes_and_slower_links_never_take_less_time(operation, size, number_of_bytes, factor):
    def seconds(n: float, bandwidth: float, latency: float) -> float:
        return collective_seconds(operation, n, group_size=size, link=Link("x", bandwidth, latency))

    base = seconds(number_of_bytes, 1e9, 1e-5)
    assert seconds(number_of_bytes * factor, 1e9, 1e-5) >= base
    assert seconds(number_of_bytes, 1e9 / factor, 1e-5) >= base
    assert seconds(number_of_bytes, 1e9, 1e-5 * factor) >= base


@pytest.mark.parametrize(("ranks_per_node", "bandwidth"), [(1, 10e9), (2, 20e9), (4, 40e9), (8, 80e9)])
def test_a_group_over_nodes_has_the_ports_of_its_ranks_there(ranks_per_node, bandwidth):
    """k rings side by side, each with a k-th of the tensor, leave each node by a port of their own."""
    assert FABRIC.link(Spread(4, ranks_per_node)) == Link("InfiniBand", bandwidth, IB.latency_s)
    rings = [collective_seconds("all_gather", 1e9 / ranks_per_node, group_size=32, link=IB)] * ranks_per_node
    together = collective_seconds("all_gather", 1e9, group_size=32, link=FABRIC.link(Spread(4, ranks_per_node)))
    assert together == pytest.approx(max(rings))


def test_more_ports_than_the_link_inside_carries_do_not_help():
    fat = Fabric(8, NVLINK, Link("InfiniBand", 50e9, 20e-6))
    assert fat.link(Spread(2, 8)).bandwidth == NVLINK.bandwidth
    assert fat.link(Spread(16, 1)).bandwidth == 50e9


def test_inside_a_node_the_network_does_not_count():
    assert FABRIC.link(Spread(1, 8)) == NVLINK
    topology = Topology(pp=1, dp=2, tp=8)
    inside = FABRIC.seconds("all_reduce", 1e9, topology=topology, axis="tensor")
    assert inside == pytest.approx(2 * 7 / 8 * 1e9 / 100e9 + 14 * 5e-6)


def test_an_axis_of_one_rank_costs_nothing():
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "send_recv"):
        assert FABRIC.seconds(operation, 1e12, topology=Topology(pp=1, dp=1, tp=1), axis="pipe") == 0


def test_two_ranks_of_a_longer_axis_have_a_port_each_and_are_two():
    """Stages on four nodes, two a node: a send, and the sum of a table that first and last stage share."""
    topology = Topology(pp=8, dp=1, tp=4)
    sent = FABRIC.seconds("send_recv", 1e9, topology=topology, axis="pipe")
    assert sent == pytest.approx(20e-6 + 1e9 / 10e9)
    summed = FABRIC.seconds("all_reduce", 1e9, topology=topology, axis="pipe", group_size=2)
    assert summed == pytest.approx(2 * 20e-6 + 2 * 1e9 / 2 / 10e9)


def test_an_unknown_link_is_one_line_with_its_name_and_what_helps():
    known = LinkConfig("NVLink", 1e11, 1e-6)
    cluster = ClusterConfig(name="mine", nodes=2, devices_per_node=4, intra_node=known)
    with pytest.raises(ValueError) as error:
        Fabric.from_config(cluster, world_size=8)
    assert str(error.value) == (
        "cluster.inter_node of cluster=mine has no bandwidth and latency_s; measure them with recipes/probe.py, or "
        "choose a cluster that has them"
    )
    assert Fabric.from_config(cluster, world_size=4).inter_node is None  # one node's ranks need no network
    with pytest.raises(ValueError, match=r"cluster\.intra_node of cluster=local has no bandwidth"):
        Fabric.from_config(ClusterConfig(), world_size=2)


def test_a_link_is_known_when_both_its_numbers_are():
    half = ClusterConfig(name="half", devices_per_node=8, intra_node=LinkConfig("x", bandwidth=inf))
    with pytest.raises(ValueError, match="intra_node"):
        Fabric.from_config(half, world_size=8)
