"""Seconds of kernels: what must hold whatever the rates, and products counted one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import ClusterConfig, DType, RatesConfig, Recompute
from parallel.kernels import Rates, block_pass, embedding_pass, head_pass, optimizer_s
from parallel.plan import ParallelPlan
from parallel.software import HERE
from tests.parallel.configs import gpt, tiny

RATES = Rates(
    matrix_flops=5e14, operand_bandwidth=6e12, attention_flops=2e14, memory_bandwidth=2e12, kernel_s=5e-6,
    micro_batch_s=1e-3, step_s=0.02, overlap=1.0,
)  # fmt: skip
FREE = replace(RATES, operand_bandwidth=1e30, attention_flops=1e30, memory_bandwidth=1e30, kernel_s=0.0)
CORE_ONLY = replace(FREE, matrix_flops=1e30, attention_flops=2e14)
DIMS = st.integers(1, 1 << 15)


def rate(m: int, k: int, n: int) -> float:
    return 2 * m * k * n / RATES.matrix_s(m, k, n, element=2)


@given(DIMS, DIMS, DIMS, st.integers(2, 8))
def test_a_products_rate_rises_with_each_dimension_and_stays_below_the_peak(m, k, n, factor):
    assert rate(m, k, n) < RATES.matrix_flops
    for larger in ((factor * m, k, n), (m, factor * k, n), (m, k, factor * n)):
        assert rate(*larger) > rate(m, k, n)


@given(DIMS, DIMS, DIMS)
def test_a_product_cut_in_two_takes_longer_than_whole_and_wider_values_too(m, k, n):
    whole = RATES.matrix_s(2 * m, k, n, element=2)
    assert 2 * RATES.matrix_s(m, k, n, element=2) > whole
    assert RATES.matrix_s(2 * m, k, n, element=4) > whole
    assert RATES.matrix_s(2 * m, k, n, element=2) == pytest.approx(RATES.matrix_s(n, k, 2 * m, element=2))


def test_a_very_large_product_comes_to_the_peak_and_a_tiny_one_to_a_kernel():
    assert rate(10**6, 10**6, 10**6) == pytest.approx(RATES.matrix_flops, rel=1e-3)
    assert RATES.matrix_s(1, 1, 1, element=2) == pytest.approx(RATES.kernel_s, rel=1e-6)


def planned(config, world_size=1):
    return ParallelPlan.from_config(config, world_size)


def test_with_free_memory_a_block_takes_its_products_flops_and_backward_twice_them():
    """12 h^2 multiply-adds a token (arXiv:2104.04473 appendix): QKV 3, out 1, MLP 8; two products in backward."""
    config = gpt(layers=2, hidden=1024, heads=16)
    once = block_pass(config, planned(config), FREE, HERE)
    flops = 2 * 12 * 1024**2 * 2048
    assert once.forward_s == pytest.approx(flops / 5e14)
    assert once.backward_s == pytest.approx(2 * flops / 5e14)
    assert once.weight_gradients_s == pytest.approx(flops / 5e14) and once.again_s == 0
    assert once.total_s == pytest.approx(3 * flops / 5e14)


def test_tensor_ranks_share_a_blocks_products():
    config = gpt(layers=2, hidden=1024, heads=16)
    alone = block_pass(config, planned(config), FREE, HERE)
    config.parallel.tp = 4
    assert block_pass(config, planned(config, 4), FREE, HERE).forward_s == pytest.approx(alone.forward_s / 4)


def test_the_fused_core_computes_the_causal_half_row_by_row_and_the_unfused_all():
    config = gpt(layers=2, hidden=1024, heads=16)
    config.data.sequence_length = 512
    scores = sum(4 * 64 * (row + 1) for row in range(512)) * 16  # two products of 64 wide heads, keys up to the row
    fused = block_pass(config, planned(config), CORE_ONLY, HERE).forward_s
    assert fused == pytest.approx(scores / 2e14, rel=2 / 512)  # the diagonal is half counted
    unfused = block_pass(config, planned(config), CORE_ONLY, replace(HERE, fused_attention=False)).forward_s
    assert unfused == pytest.approx(4 * 64 * 512 * 512 * 16 / 2e14)


def test_recomputation_runs_the_core_or_the_whole_forward_again():
    config = gpt(layers=2, hidden=1024, heads=16)
    none = block_pass(config, planned(config), RATES, HERE)
    config.parallel.recompute = Recompute.full
    full = block_pass(config, planned(config), RATES, HERE)
    assert full.again_s == full.forward_s == none.forward_s and full.backward_s == none.backward_s
    config.parallel.recompute = Recompute.selective
    core = block_pass(config, planned(config), CORE_ONLY, HERE)
    assert core.again_s == pytest.approx(core.forward_s)
    assert 0 < block_pass(config, planned(config), RATES, HERE).again_s < full.again_s


def test_the_head_takes_its_logits_product_three_times():
    config = gpt(layers=2, hidden=1024, heads=16)
    once = head_pass(config, planned(config), FREE)
    product = 2 * 2048 * 1024 * 51200 / 5e14
    assert (once.forward_s, once.backward_s) == (pytest.approx(product), pytest.approx(2 * product))


@pytest.mark.parametrize("name", ["matrix_flops", "operand_bandwidth", "attention_flops", "memory_bandwidth"])
def test_a_slower_device_is_slower_everywhere(name):
    config = gpt(layers=2, hidden=1024, heads=16)
    plan, slow = planned(config), replace(RATES, **{name: getattr(RATES, name) / 2})
    totals = [
        (block_pass(config, plan, rates, HERE).total_s, head_pass(config, plan, rates).total_s,
         embedding_pass(config, plan, rates).total_s, optimizer_s(1e9, config, plan, rates))
        for rates in (RATES, slow)
    ]  # fmt: skip
    assert all(after >= before for before, after in zip(*totals, strict=True)) and totals[0] != totals[1]


def test_zero_spreads_the_optimizers_work_and_the_host_takes_it_at_its_links_pace():
    config = tiny(precision__dtype="bf16", zero__stage=1, train__micro_batch_size=1, train__global_batch_size=8)
    memory = replace(FREE, memory_bandwidth=1e9)
    alone, spread = (optimizer_s(1e9, config, planned(config, n), memory) for n in (1, 4))
    # 7 values of 4 bytes and a 16-bit weight on a rank's share; the norm reads all gradients
    assert (alone, spread) == (pytest.approx(30 + 4), pytest.approx(30 / 4 + 4))
    config.zero.offload_optimizer = True
    with pytest.raises(ValueError, match=r"cluster\.host of cluster=local has no bandwidth, which zero\.offload"):
        optimizer_s(1e9, config, planned(config, 4), memory)
    config.cluster.host.bandwidth = 1e8
    assert optimizer_s(1e9, config, planned(config, 4), memory) == pytest.approx(30 / 4 * 10)


def test_rates_that_are_missing_are_named_in_one_line():
    cluster = ClusterConfig(name="mine", rates=RatesConfig(matrix_flops=1.0, attention_flops=1.0, kernel_s=0.0))
    with pytest.raises(ValueError) as error:
        Rates.from_config(cluster, DType.bf16)
    assert str(error.value) == (
        "cluster.rates of cluster=mine has no operand_bandwidth, memory_bandwidth; measure them with recipes/probe.py, "
        "or choose a cluster that has them"
    )


def test_rates_of_another_width_are_refused_and_of_another_16_bit_format_taken():
    known = RatesConfig(1.0, 1.0, 1.0, 1.0, 0.0, dtype=DType.bf16)
    cluster = ClusterConfig(name="mine", rates=known)
    assert Rates.from_config(cluster, DType.fp16) == Rates.from_config(cluster, DType.bf16)
    with pytest.raises(ValueError) as error:
        Rates.from_config(cluster, DType.fp32)
    assert str(error.value) == (
        "cluster.rates of cluster=mine are those of bf16, not of precision.dtype=fp32; use precision=bf16, or measure "
        "them with recipes/probe.py"
    )
