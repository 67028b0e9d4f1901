"""Ranks and coordinates, against DeepSpeed's own topology and by hand."""

from __future__ import annotations

import itertools

import pytest
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from parallel.topology import AXES, Topology

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
