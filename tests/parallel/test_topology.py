"""Ranks and coordinates, against DeepSpeed's own topology and by hand."""

from __future__ import annotations

import itertools

import pytest
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology

from parallel.topology import AXES, Spread, Topology

SHAPES = list(itertools.product((1, 2, 3), (1, 2), (1, 2, 4)))


@pytest.mark.parametrize(("pp", "dp", "tp"), SHAPES)
def test_coordinates_are_deepspeeds(pp, dp, tp):
    topology, theirs = Topology(pp=pp, dp=dp, tp=tp), PipeModelDataParallelTopology(num_pp=pp, num_dp=dp, num_mp=tp)
    for rank in range(topology.world_size):
        coordinate = theirs.get_coord(rank)
        assert topology.coordinate(rank) == (coordinate.pipe, coordinate.data, coordinate.model)


@pytest.mark.parametrize(("pp", "dp", "tp"), SHAPES)
def test_rank_and_coordinate_are_inverse_and_each_axis_covers_the_world_once(pp, dp, tp):
    topology = Topology(pp=pp, dp=dp, tp=tp)
    for rank in range(topology.world_size):
        p, d, t = topology.coordinate(rank)
        assert topology.rank(pp=p, dp=d, tp=t) == rank
        assert all(rank in topology.group_of(rank, axis) for axis in AXES)
    for axis in AXES:
        assert sorted(itertools.chain(*topology.lines(axis))) == list(range(topology.world_size))


def test_eight_ranks_by_hand():
    topology = Topology(pp=2, dp=2, tp=2)
    assert topology.lines("tensor") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert topology.lines("data") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert topology.lines("pipe") == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_tensor_ranks_stay_inside_a_node_while_they_fit():
    topology = Topology(pp=2, dp=2, tp=4)
    assert topology.crossing_axes(16) == ()
    assert topology.crossing_axes(8) == ("pipe",)
    assert topology.crossing_axes(4) == ("pipe", "data")
    assert topology.crossing_axes(2) == ("pipe", "data", "tensor")


def test_ranks_outside_the_world_and_unknown_axes_are_refused():
    topology = Topology(pp=1, dp=2, tp=1)
    with pytest.raises(ValueError, match="rank 2 is outside a world of 2; ranks are 0 to 1"):
        topology.coordinate(2)
    with pytest.raises(ValueError, match="data rank 2 is outside an axis of 2"):
        topology.rank(pp=0, dp=2, tp=0)
    with pytest.raises(ValueError, match="axis model is not on the mesh"):
        topology.lines("model")


ORDERS = list(itertools.permutations(AXES))
SIZES = [(2, 3, 4), (3, 2, 2), (1, 5, 2), (4, 1, 3), (2, 2, 1), (1, 1, 1)]


@pytest.mark.parametrize("order", ORDERS, ids="_".join)
@pytest.mark.parametrize(("pp", "dp", "tp"), SIZES)
def test_every_order_places_ranks_as_deepspeeds_own_grid_does(order, pp, dp, tp):
    topology = Topology(pp=pp, dp=dp, tp=tp, order=order)
    sizes = {"pipe": pp, "data": dp, "tensor": tp}
    theirs = ProcessTopology(axes=list(order), dims=[sizes[axis] for axis in order])
    seen = set()
    for rank in range(pp * dp * tp):
        coordinate = theirs.get_coord(rank)
        assert topology.coordinate(rank) == (coordinate.pipe, coordinate.data, coordinate.tensor)
        p, d, t = topology.coordinate(rank)
        assert topology.rank(pp=p, dp=d, tp=t) == rank == theirs.get_rank(pipe=p, data=d, tensor=t)
        seen.add((p, d, t))
    assert len(seen) == pp * dp * tp
    for axis in AXES:
        lines = topology.lines(axis)
        assert sorted(itertools.chain(*lines)) == list(range(pp * dp * tp))
        if sizes[axis] > 1:  # DeepSpeed lists no lines of one rank
            assert sorted(lines) == sorted(map(tuple, theirs.get_axis_comm_lists(axis)))
        for line in lines:
            assert all(topology.group_of(rank, axis) == line for rank in line)


@pytest.mark.parametrize("order", ORDERS, ids="_".join)
@pytest.mark.parametrize("per_node", [1, 2, 3, 4, 5, 8, 16])
def test_spread_is_the_worst_over_all_groups_rank_by_rank(order, per_node):
    """Also where a group's stride does not divide a node, so that groups of one axis lie on nodes differently."""
    for pp, dp, tp in SIZES:
        topology = Topology(pp=pp, dp=dp, tp=tp, order=order)
        for axis in AXES:
            nodes, fewest = 1, {"pipe": pp, "data": dp, "tensor": tp}[axis]
            for rank in range(pp * dp * tp):
                place = topology.coordinate(rank)
                number = AXES.index(axis)
                fixed = place[:number] + place[number + 1 :]
                group = [
                    other
                    for other in range(pp * dp * tp)
                    if topology.coordinate(other)[:number] + topology.coordinate(other)[number + 1 :] == fixed
                ]
                hosts = [other // per_node for other in group]
                nodes, fewest = max(nodes, len(set(hosts))), min(fewest, *map(hosts.count, hosts))
            assert topology.spread(axis, per_node) == Spread(nodes, fewest), (axis, pp, dp, tp)
