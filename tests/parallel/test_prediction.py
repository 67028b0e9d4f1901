"""A step's prediction: its parts add up, hand sums and conventions hold, better hardware never slows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conf.schema import Config, LinkConfig, Schedule
from parallel.flops import utilisation
from parallel.kernels import Rates, block_pass, embedding_pass, head_pass, optimizer_s
from parallel.plan import ParallelPlan
from parallel.prediction import Prediction, predict_run
from parallel.software import HERE
from tests.parallel.configs import measured_cluster, tiny


def config_of(**changes: Any) -> Config:
    config = tiny(**{"train__global_batch_size": 16, "zero__stage": 1, **changes})
    network = LinkConfig("network", bandwidth=1e8, latency_s=1e-3)
    cluster = measured_cluster(nodes=2, devices_per_node=4, inter_node=network, peak_flops=1e12)
    cluster.rates = replace(cluster.rates, micro_batch_s=1e-3, step_s=2e-2, overlap=0.5)
    return replace(config, cluster=cluster)


def predicted(world_size: int = 8, config: Config | None = None, **changes: Any) -> Prediction:
    config = config_of(**changes) if config is None else config
    config.cluster.nodes, config.cluster.devices_per_node = (2, 4) if world_size == 8 else (1, world_size)
    return predict_run(config, ParallelPlan.from_config(config, world_size, device="cpu"), device="cpu")


PLANS = {
    "dp8": dict(),
    "tp2 dp4": dict(parallel__tp=2),
    "tp2 pp2 dp2": dict(parallel__tp=2, parallel__pp=2, parallel__sequence_parallel=True, parallel__recompute="full"),
    "pp4": dict(parallel__pp=4, parallel__recompute="selective"),
    "dualpipev": dict(parallel__pp=2, parallel__schedule=Schedule["dualpipev"]),
    "eager1f1b": dict(parallel__pp=4, parallel__schedule=Schedule["eager1f1b"]),
    "zero2": dict(zero__stage=2),
    "zero3": dict(zero__stage=3),
    "tied": dict(parallel__pp=4, model__tie_word_embeddings=True),
}


@pytest.mark.parametrize("changes", PLANS.values(), ids=PLANS)
def test_seconds_by_what_add_up_to_the_step_and_none_is_negative(changes):
    whole = predicted(**changes)
    assert sum(whole.seconds.values()) == pytest.approx(whole.step_s)
    assert all(seconds >= -1e-9 for seconds in whole.seconds.values()), whole.seconds
    assert whole.tokens_per_s == pytest.approx(16 * 32 / whole.step_s)
    assert whole.tokens_per_s_per_device == pytest.approx(whole.tokens_per_s / 8)
    assert all(0 <= bubble < 1 for bubble in whole.bubble) and whole.imbalance >= 1


@pytest.mark.parametrize("changes", PLANS.values(), ids=PLANS)
def test_better_links_and_rates_never_slow_a_step(changes):
    base = predicted(**changes).step_s
    for field in ("matrix_flops", "operand_bandwidth", "attention_flops", "memory_bandwidth"):
        config = config_of(**changes)
        setattr(config.cluster.rates, field, 3 * getattr(config.cluster.rates, field))
        assert predicted(config=config).step_s <= base * (1 + 1e-9), field
    for link in ("intra_node", "inter_node"):
        config = config_of(**changes)
        better = replace(getattr(config.cluster, link), bandwidth=1e10, latency_s=1e-6)
        setattr(config.cluster, link, better)
        assert predicted(config=config).step_s <= base * (1 + 1e-9), link


def test_one_device_takes_its_layers_times_micro_batches_and_one_optimizer_step():
    config = config_of()
    whole = predicted(1, config)
    plan, rates = whole.plan, Rates.from_config(config.cluster, config.precision.dtype)
    block, first, last = (
        block_pass(config, plan, rates, HERE), embedding_pass(config, plan, rates), head_pass(config, plan, rates)
    )  # fmt: skip
    by_hand = 16 * (4 * block.total_s + first.total_s + last.total_s + 1e-3)
    by_hand += optimizer_s(180_800, config, plan, rates) + 2e-2
    assert whole.step_s == pytest.approx(by_hand) and whole.bubble == (0.0,)
    assert [len(calls) for calls in whole.collectives] == [0]


def test_two_even_stages_take_the_bubble_of_1f1b():
    """(P - 1) / (M + P - 1) of the pipeline's time, arXiv:2104.04473, with ends and transfers made free."""
    config = config_of(parallel__pp=2, model__vocab_size=1, model__make_vocab_size_divisible_by=1)
    config.cluster.rates.memory_bandwidth = config.cluster.rates.operand_bandwidth = 1e30
    config.cluster.rates.kernel_s = 0.0
    config.cluster.rates.step_s = 0.0
    config.cluster.intra_node = LinkConfig("free", 1e30, 0.0)
    whole = predicted(2, config)
    assert whole.bubble == (pytest.approx(1 / 17, rel=0.01),) * 2  # the head of one word, and embedding, are not free


class TestUtilisation:
    """Case H4: recomputation is no use, and counts for the hardware; a known peak, or none at all."""

    BLOCK = 3 * 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128) + 3 * 4 * 32 * 64  # FLOPs of a token in a block
    HEAD = 3 * 2 * 64 * 256

    def test_mfu_is_the_formula_over_peak_and_time_with_and_without_recomputation(self):
        for recompute in ("none", "full"):
            whole = predicted(4, parallel__recompute=recompute)
            flops = 16 * 32 * (4 * self.BLOCK + self.HEAD)
            assert whole.mfu == pytest.approx(flops / whole.step_s / 4 / 1e12, rel=1e-12)

    def test_full_recomputation_makes_the_blocks_hfu_four_thirds(self):
        """The head is not computed again: its share stays as it is."""
        whole = predicted(4, parallel__recompute="full")
        flops = 16 * 32 * (4 * self.BLOCK * 4 / 3 + self.HEAD)
        assert whole.hfu == pytest.approx(flops / whole.step_s / 4 / 1e12, rel=1e-12)
        none = predicted(4)
        assert none.hfu == none.mfu

    def test_selective_recomputation_counts_the_core_once_more(self):
        whole = predicted(4, parallel__recompute="selective")
        flops = 16 * 32 * (4 * (self.BLOCK + 4 * 32 * 64) + self.HEAD)
        assert whole.hfu == pytest.approx(flops / whole.step_s / 4 / 1e12, rel=1e-12)

    def test_a_peak_of_1e12_and_a_step_of_one_second_give_the_formula_exactly(self):
        assert utilisation(3.5e11, step_time_s=1.0, world_size=1, peak_flops=1e12) == 3.5e11 / 1e12

    def test_without_a_peak_there_is_no_utilisation(self):
        config = config_of()
        config.cluster.peak_flops = None
        whole = predicted(config=config)
        assert whole.mfu is None and whole.hfu is None and whole.step_s > 0


def test_the_price_of_every_collective_stands_beside_its_link():
    whole = predicted(parallel__tp=2, parallel__pp=2)
    links = {priced.collective.axis: priced.link for calls in whole.collectives for priced in calls}
    assert links == {"tensor": "loopback", "data": "loopback", "pipe": "network"}


def test_a_cluster_that_nobody_measured_has_no_prediction():
    config = config_of()
    config.cluster.rates.kernel_s = None
    with pytest.raises(ValueError, match=r"cluster\.rates of cluster=measured has no kernel_s"):
        predicted(config=config)
