"""Which axis lies on which link, and the price of another place."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from conf.cli import compose_config
from conf.schema import Config, LinkConfig
from parallel.links import Fabric
from parallel.placement import prices, warnings
from parallel.plan import ParallelPlan
from parallel.prediction import predict_run
from tests.parallel.configs import measured_cluster, tiny


def two_nodes(**changes) -> Config:
    """Two nodes of two devices, with a network a tenth as fast."""
    config = tiny(**{"train__global_batch_size": 16, "zero__stage": 1, **changes})
    slow = LinkConfig("network", bandwidth=5e7, latency_s=1e-3)
    config = replace(config, cluster=measured_cluster(nodes=2, devices_per_node=2, inter_node=slow))
    config.cluster.rates.overlap = 0.0
    return config


def priced(config: Config, compute_s: float = 0.0):
    plan = ParallelPlan.from_config(config, 4, device="cpu")
    return plan, prices(config, plan, Fabric.from_config(config.cluster, world_size=4), compute_s=compute_s)


def test_the_axis_that_loses_most_by_leaving_comes_first():
    _, found = priced(two_nodes(parallel__tp=2))
    assert [price.axis for price in found] == ["tensor", "data"]
    assert found[0].loss_s > found[1].loss_s > 0
    tensor, data = found
    assert tensor.placed_s == tensor.inside_s and tensor.link == "loopback"
    assert data.placed_s == data.across_s and data.link == "network"


def test_a_tensor_axis_across_nodes_makes_the_step_longer_by_the_price_that_is_printed():
    inside = two_nodes(parallel__tp=2)
    across = two_nodes(parallel__tp=2, parallel__order="pipe_tensor_data")
    plan, found = priced(inside)
    near, far = (predict_run(c, ParallelPlan.from_config(c, 4, device="cpu"), device="cpu") for c in (inside, across))
    tensor, data = found
    # Tensor ranks move out, and data ranks, which were outside, in.
    assert far.step_s - near.step_s == pytest.approx(tensor.loss_s - data.loss_s)
    assert far.seconds["tensor"] - near.seconds["tensor"] == pytest.approx(tensor.loss_s)
    (line,) = warnings(across, ParallelPlan.from_config(across, 4, device="cpu"))
    assert re.fullmatch(
        r"parallel\.tp=2 in order pipe_tensor_data crosses nodes of 2 devices: [\d.]+ GB a step and rank leave the "
        rf"node, {re.escape(f'{tensor.across_s:.3g}')} s on network for {re.escape(f'{tensor.inside_s:.3g}')} s on "
        r"loopback; keep tp within a node, with the tensor axis last in parallel\.order",
        line,
    )
    assert warnings(inside, plan) == []


def test_what_hides_behind_computation_is_no_price():
    config = two_nodes(parallel__tp=2)
    config.cluster.rates.overlap = 1.0
    _, all_shown = priced(config, compute_s=0.0)
    _, hidden = priced(config, compute_s=1e9)
    shown = {price.axis: price for price in all_shown}
    for price in hidden:
        assert price.across_s <= shown[price.axis].across_s
        assert price.inside_s <= shown[price.axis].inside_s
    tensor = next(price for price in hidden if price.axis == "tensor")
    assert 0 < tensor.across_s < shown["tensor"].across_s  # forward's are waited for


def test_stages_send_through_one_port_each():
    config = two_nodes(parallel__pp=4)
    _, found = priced(config)
    (pipe,) = found
    assert pipe.placed_s == pipe.across_s == pytest.approx(pipe.calls * 1e-3 + pipe.bytes / 5e7)


def test_a_tensor_axis_across_nodes_without_known_links_is_still_warned_of():
    config = compose_config(
        ["model=llama_8b", "cluster=local", "cluster.nodes=2", "cluster.devices_per_node=4", "parallel.tp=8"]
    )
    (line,) = warnings(config, ParallelPlan.from_config(config, 8, device="cpu"))
    assert (
        line.startswith("parallel.tp=8 in order pipe_data_tensor crosses nodes of 4 devices: ") and " s on " not in line
    )


def test_on_one_node_nothing_is_lost():
    config = tiny(parallel__tp=2, train__global_batch_size=16)
    config = replace(config, cluster=measured_cluster())
    _, found = priced(config)
    assert all(price.loss_s == 0 and price.link == "loopback" for price in found)
