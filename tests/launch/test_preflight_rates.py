"""Who is called slow, at the boundary of 20 %: by rank for products, by host and by link for transfers."""

from __future__ import annotations

import pytest

from launch import preflight_rates as rates
from tests.launch.test_preflight_checks import red


@pytest.mark.parametrize(
    ("rate", "text"), [(80e9, None), (79e9, "79 GFLOP/s on slot 3, the others' median is 100 GFLOP/s")]
)
def test_a_rank_that_lacks_more_than_a_fifth_is_told_by_its_slot(rate, text):
    cells = rates.matrix({"w0": [100e9, 100e9], "w1": [100e9, rate]}, {"w0": [0, 1], "w1": [2, 3]})
    assert red(cells) == ({} if text is None else {"w1": text})


def test_a_fast_one_is_no_fault_of_the_others_and_a_rank_alone_has_none():
    assert red(rates.matrix({"w0": [1e12], "w1": [1e12], "w2": [5e12]}, {"w0": [0], "w1": [0], "w2": [0]})) == {}
    assert rates.matrix({"w0": [1e12]}, {"w0": [0]})["w0"].text == "ok: 1 TFLOP/s to 1 TFLOP/s a rank"


def test_of_several_slow_slots_the_slowest_is_told():
    cells = rates.matrix({"w0": [1e12] * 4, "w1": [1e12, 5e11, 4e11, 6e11]}, {"w0": [0, 1, 2, 3], "w1": [4, 5, 6, 7]})
    assert cells["w1"].text.startswith("400 GFLOP/s on slot 6, ")


def edges(hosts: str, **slow: float) -> dict[tuple[str, str], float]:
    """Every pair at 1 GB/s but those named: ab=... from a to b."""
    return {(a, b): slow.get(a + b, 1e9) for a in hosts for b in hosts if a != b}


def test_a_host_that_receives_slowly_is_told_and_its_partners_are_not():
    assert red(rates.links(edges("abc", ab=0.8e9, cb=0.8e9))) == {}
    told = red(rates.links(edges("abc", ab=0.5e9, cb=0.6e9)))
    assert told == {"b": "receives at most 600 MB/s, the others' median is 1 GB/s"}


def test_a_host_that_is_slow_both_ways_is_found_among_three():
    told = red(rates.links(edges("abc", ab=1e8, cb=1e8, ba=1e8, bc=1e8)))
    assert told == {"b": "sends at most 100 MB/s, the others' median is 1 GB/s"}


def test_between_two_hosts_either_end_may_be_it():
    told = red(rates.links(edges("ab", ab=1e8)))
    assert told == {
        "a": "sends at most 100 MB/s, the others' median is 1 GB/s",
        "b": "receives at most 100 MB/s, the others' median is 1 GB/s",
    }


def test_a_link_between_two_hosts_that_are_fast_with_others_is_told_on_both():
    told = red(rates.links(edges("abcd", bd=5e8)))
    assert told == dict.fromkeys("bd", "b to d 500 MB/s, though both do 1 GB/s with others")
