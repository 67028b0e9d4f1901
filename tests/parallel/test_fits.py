"""Fits of links and rates: exact times give their numbers back, scattered ones a fit that no other beats."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from parallel.fit_links import Sample, fit_link, predicted_s
from parallel.fit_rates import MatrixLaw, Product, fit_matrix_law
from parallel.fitting import fit_terms, mean_error
from parallel.kernels import Rates
from parallel.links import Link, collective_seconds
from parallel.topology import Spread

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
SIZES = [4096 * 4**power for power in range(9)]


def samples_of(link: Link, *, group_size: int, spread: Spread) -> list[Sample]:
    """What the plan's formula says, with the ports of all ranks on a node."""
    ports = spread.ranks_per_node if spread.nodes > 1 else 1
    whole = Link(link.name, link.bandwidth * ports, link.latency_s)
    return [
        Sample("data", one, size, group_size, spread, collective_seconds(one, size, group_size=group_size, link=whole))
        for one in OPERATIONS
        for size in SIZES
    ]


@pytest.mark.parametrize("group_size", [2, 3, 8, 64])
@pytest.mark.parametrize("link", [Link("NVLink", 360e9, 6e-6), Link("loopback", 1.9e9, 3e-4), Link("none", 1e9, 0.0)])
def test_a_link_is_found_again_from_the_times_of_its_collectives(link, group_size):
    found = fit_link(samples_of(link, group_size=group_size, spread=Spread(1, group_size)), name=link.name)
    assert found.bandwidth == pytest.approx(link.bandwidth, rel=1e-6)
    assert found.latency_s == pytest.approx(link.latency_s, rel=1e-6, abs=1e-12)


def test_ranks_of_a_node_that_send_out_together_each_get_their_share_of_the_bandwidth():
    link = Link("InfiniBand", 45e9, 12e-6)
    samples = samples_of(link, group_size=16, spread=Spread(nodes=4, ranks_per_node=4))
    found = fit_link(samples, name=link.name)
    assert (found.bandwidth, found.latency_s) == (pytest.approx(45e9, rel=1e-6), pytest.approx(12e-6, rel=1e-6))
    assert [predicted_s(one, found) for one in samples] == pytest.approx([one.seconds for one in samples], rel=1e-6)


def test_times_that_do_not_grow_with_bytes_are_refused_with_the_knob():
    samples = [Sample("data", "send_recv", size, 2, Spread(1, 2), 1 / size) for size in (1, 2, 4)]
    with pytest.raises(ValueError, match=r"up to 4 bytes do not grow with their bytes; raise probe\.largest_message"):
        fit_link(samples, name="x")


SHAPES = [(m, k, n) for m in (16, 256, 4096) for k in (64, 1024) for n in (16, 512, 8192)]


@pytest.mark.parametrize("law", [MatrixLaw(700e12, 4e12, 5e-6), MatrixLaw(4e10, 1.5e10, 0.0)])
def test_the_matrix_law_is_found_again_from_its_times(law):
    products = [Product(m, k, n, 2, law.seconds(Product(m, k, n, 2, 0.0))) for m, k, n in SHAPES]
    found = fit_matrix_law(products, memory_bandwidth=1.0)
    assert found.matrix_flops == pytest.approx(law.matrix_flops, rel=1e-6)
    assert found.operand_bandwidth == pytest.approx(law.operand_bandwidth, rel=1e-6)
    assert found.kernel_s == pytest.approx(law.kernel_s, rel=1e-6, abs=1e-12)


def test_the_law_that_is_fitted_is_the_one_that_plans_use():
    law = MatrixLaw(700e12, 4e12, 5e-6)
    rates = Rates(law.matrix_flops, law.operand_bandwidth, 1.0, 1.0, law.kernel_s, 0.0, 0.0, 1.0)
    assert law.seconds(Product(64, 128, 32, 2, 0.0)) == pytest.approx(rates.matrix_s(64, 128, 32, element=2), rel=1e-12)


def test_where_bytes_cost_nothing_beside_flops_they_get_the_bandwidth_of_memory():
    products = [Product(m, k, n, 4, 0.0) for m, k, n in SHAPES]
    products = [replace(one, seconds=1e-5 + one.flops / 1e12 - one.bytes * 1e-14) for one in products]
    assert fit_matrix_law(products, memory_bandwidth=3e15).operand_bandwidth == pytest.approx(3e15)


def loss(coefficients, rows, seconds):
    """The symmetric relative error, written anew."""
    fitted = [sum(c * x for c, x in zip(coefficients, row, strict=True)) for row in rows]
    return sum(f / m + m / f - 2 for m, f in zip(seconds, fitted, strict=True))


def test_no_other_numbers_fit_scattered_times_better():
    rng = random.Random(0)
    rows = [(1.0, float(4**power)) for power in range(10) for _ in range(4)]
    seconds = [(1e-4 + 1e-9 * row[1]) * rng.choice([0.5, 2.0]) for row in rows]
    found = fit_terms(rows, seconds)
    steps = (0.5, 0.9, 0.99, 1.0, 1.01, 1.1, 2.0)
    others = [loss((a * found[0], b * found[1]), rows, seconds) for a in steps for b in steps if (a, b) != (1, 1)]
    assert loss(found, rows, seconds) < min(others)


def test_a_term_that_would_be_negative_is_left_out():
    rows = [(1.0, float(n)) for n in (1, 2, 3, 4)]
    assert fit_terms(rows, [0.5, 1.9, 3.1, 4.5])[0] == 0.0


def test_the_mean_error_counts_above_and_below():
    assert mean_error([1.0, 2.0], [1.1, 1.8]) == pytest.approx(0.1)
