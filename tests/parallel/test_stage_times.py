"""Seconds of stages: kernels and collectives added by hand, and what hides behind what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conf.schema import Config, LinkConfig
from parallel.communication import ledger
from parallel.kernels import Rates, block_pass, embedding_pass, head_pass
from parallel.links import Fabric
from parallel.plan import ParallelPlan
from parallel.software import HERE, Software
from parallel.stage_times import LayerTimes, stage_times
from tests.parallel.configs import measured_cluster, tiny


def times_of(world_size: int, *, overlap: float = 0.0, software: Software = HERE, **changes: Any) -> LayerTimes:
    config: Config = tiny(**{"train__global_batch_size": 16, "zero__stage": 1, **changes})
    config = replace(config, cluster=measured_cluster())
    config.cluster.rates.overlap = overlap
    plan = ParallelPlan.from_config(config, world_size, device="cpu")
    rates = Rates.from_config(config.cluster, config.precision.dtype)
    return LayerTimes(config, plan, rates, Fabric.from_config(config.cluster, world_size=world_size), software)


def test_a_stage_alone_is_the_sum_of_its_layers():
    times = times_of(1)
    (stage,) = stage_times(times)
    config, plan, rates = times.config, times.plan, times.rates
    layers = [block_pass(config, plan, rates, HERE)] * 4
    layers += [embedding_pass(config, plan, rates), head_pass(config, plan, rates)]
    assert stage.forward_s == pytest.approx(sum(layer.forward_s for layer in layers))
    assert stage.backward_s == pytest.approx(sum(layer.backward_s for layer in layers))
    assert (stage.tensor_s, stage.data_s, stage.send_s, stage.again_s) == (0, 0, 0, 0)
    tail = times.tail(0)
    assert (tail.reduce_s, tail.gather_s) == (0, 0) and tail.optimizer_s > 0


def test_each_micro_batch_costs_a_stage_its_fixed_time_once():
    times = times_of(1)
    plain = stage_times(times)[0]
    times.rates = replace(times.rates, micro_batch_s=0.5)
    fixed = stage_times(times)[0]
    assert fixed.forward_s + fixed.backward_s == pytest.approx(plain.forward_s + plain.backward_s + 0.5)


def test_without_overlap_every_tensor_collective_of_the_ledger_is_waited_for():
    for changes in (dict(), dict(parallel__sequence_parallel=True), dict(parallel__recompute="full")):
        times = times_of(2, parallel__tp=2, **changes)
        (stage,) = stage_times(times)
        count = times.plan.num_micro_batches
        # An alpha-beta ring of two: two messages of half the tensor for an all-reduce, one for its halves.
        by_hand = sum(
            call.calls * {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}[call.operation]
            * (2e-4 + call.bytes / 2 / 5e8)
            for call in ledger(times.config, times.plan, 0)
            if call.axis == "tensor"
        )  # fmt: skip
        assert count * stage.tensor_s == pytest.approx(by_hand)
        assert stage.forward_s + stage.backward_s == pytest.approx(stage.compute_s + stage.again_s + stage.tensor_s)


def test_what_may_hide_is_gone_where_it_does_and_is_shorter_than_what_it_hides_behind():
    shown, hidden = times_of(2, parallel__tp=2), times_of(2, parallel__tp=2, overlap=1.0)
    call = 2 * (2e-4 + 32 * 64 * 4 / 2 / 5e8)  # an all-reduce of the hidden state
    weights = hidden.block.compute.weight_gradients_s
    assert shown.block.tensor_backward_s == pytest.approx(2 * call)
    assert hidden.block.tensor_backward_s == pytest.approx(max(0.0, 2 * call - weights))
    assert hidden.block.tensor_forward_s == shown.block.tensor_forward_s == pytest.approx(2 * call)
    half = times_of(2, parallel__tp=2, overlap=0.5)
    assert half.block.tensor_backward_s == pytest.approx(2 * call - 0.5 * min(2 * call, weights))


def test_a_send_is_one_message_of_the_hidden_state_and_a_share_of_it_where_it_is_partitioned():
    whole = times_of(4, parallel__tp=2, parallel__pp=2)
    assert whole.send_s == pytest.approx(2e-4 + 32 * 64 * 4 / 5e8)
    shared = times_of(4, parallel__tp=2, parallel__pp=2, software=replace(HERE, partitioned_sends=True))
    assert shared.send_s == pytest.approx(2e-4 + 32 * 64 * 4 / 2 / 5e8)


def test_gradients_are_reduced_and_weights_gathered_once_a_step():
    times = times_of(2)
    parameters = 180_544 + 256  # the TINY model
    tail = times.tail(0)
    assert tail.reduce_s == pytest.approx(2 * (2e-4 + 4 * parameters / 2 / 5e8))
    assert tail.gather_s == pytest.approx(2 * 2e-4 + 4 * parameters / 2 / 5e8)  # matrices and norms by themselves


def test_of_two_stages_the_one_with_the_head_takes_longer_by_it():
    times = times_of(2, parallel__pp=2, parallel__stages=[2, 2])
    first, last = stage_times(times)
    assert last.forward_s - first.forward_s == pytest.approx(times.head.forward_s - times.embedding.forward_s)


def test_a_faster_link_never_slows_a_stage():
    times = times_of(4, parallel__tp=2, parallel__pp=2, overlap=0.7)
    before = stage_times(times)
    cluster = times.config.cluster
    cluster.intra_node = LinkConfig("faster", bandwidth=5e9, latency_s=2e-5)
    after = stage_times(
        LayerTimes(times.config, times.plan, times.rates, Fabric.from_config(cluster, world_size=4), HERE)
    )
    for old, new in zip(before, after, strict=True):
        assert new.forward_s < old.forward_s and new.backward_s < old.backward_s and new.send_s < old.send_s
