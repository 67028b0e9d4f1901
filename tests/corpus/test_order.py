"""Shuffles and interleavings: bijective, fair, stable, and known at any place without the places before."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus.order import Interleave, order_key, permute


@given(size=st.integers(1, 600), key=st.integers(0, 2**64 - 1))
@settings(max_examples=60)
def test_permute_meets_each_place_once(size, key):
    assert sorted(permute(i, size=size, key=key) for i in range(size)) == list(range(size))


def test_permute_reaches_all_orders_of_four_about_equally():
    runs = 2400
    seen = Counter(tuple(permute(i, size=4, key=order_key(seed)) for i in range(4)) for seed in range(runs))
    assert len(seen) == 24
    chi_square = sum((count - runs / 24) ** 2 / (runs / 24) for count in seen.values())
    assert chi_square < 49.7  # the 0.1 % point of chi-square at 23 degrees of freedom


def test_permute_neighbours_are_unrelated():
    size = 10_000
    images = [permute(i, size=size, key=order_key("x")) for i in range(size)]
    steps = Counter((b - a) % size for a, b in itertools.pairwise(images))
    assert max(steps.values()) <= 10  # steps are near Poisson(1): above 10 in one of 10^4 has chance 10^-4


def test_permute_is_the_same_on_every_machine():
    assert [permute(i, size=10, key=order_key(1234, "stdlib", 0)) for i in range(10)] == [7, 8, 5, 4, 9, 2, 0, 1, 3, 6]


def test_permute_of_a_huge_size_needs_no_table():
    size = 10**15
    images = {permute(i, size=size, key=5) for i in range(1000)}
    assert len(images) == 1000 and max(images) < size


def test_permute_refuses_a_place_outside():
    with pytest.raises(ValueError, match="index=3"):
        permute(3, size=3, key=0)


WEIGHTS = st.lists(st.one_of(st.integers(1, 100), st.floats(0.001, 1000.0)), min_size=1, max_size=9)


@given(weights=WEIGHTS, draws=st.integers(0, 10**12))
@settings(max_examples=200)
def test_every_prefix_of_a_blend_has_the_weights_within_two_samples(weights, draws):
    counts = Interleave(weights).counts(draws)
    assert sum(counts) == draws
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - draws * weight / sum(weights)) <= 2 + 1e-3 * (draws > 10**9)  # float error of the check


@given(weights=WEIGHTS, draws=st.integers(1, 300))
@settings(max_examples=60)
def test_a_blend_visits_each_source_in_order_without_gaps(weights, draws):
    interleave = Interleave(weights)
    seen = [0] * len(weights)
    for draw in range(draws):
        source, place = interleave.place(draw)
        assert place == seen[source]
        seen[source] += 1
    assert seen == interleave.counts(draws)


def test_a_blend_of_three_to_one_takes_three_of_each_four():
    sources = [Interleave([3, 1]).place(i)[0] for i in range(40)]
    assert all(sorted(sources[i : i + 4]) == [0, 0, 0, 1] for i in range(0, 40, 4))


@pytest.mark.parametrize("weights", [[], [0], [1, -1], [float("nan")], [float("inf"), 1]])
def test_weights_must_be_positive_numbers(weights):
    with pytest.raises(ValueError, match="weights"):
        Interleave(weights)
