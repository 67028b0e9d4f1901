"""The probe of hosts: every two of them meet at most once, and what ranks measured of each other comes out whole."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from engine.device import this_device
from engine.probe_hosts import differ, link_rates, matrix_rates, pairings
from tests.ranks import run_ranks


@pytest.mark.parametrize("hosts", range(1, 10))
def test_hosts_meet_in_disjoint_pairs_each_two_of_them_once(hosts):
    rounds = pairings(hosts, most=hosts)
    pairs = [frozenset(pair) for of_round in rounds for pair in of_round]
    assert sorted(map(sorted, pairs)) == [list(pair) for pair in combinations(range(hosts), 2)]
    for of_round in rounds:
        assert len({host for pair in of_round for host in pair}) == 2 * len(of_round)


def test_of_many_hosts_each_has_three_partners():
    rounds = pairings(64, most=3)
    assert len(rounds) == 3 and all(len(of_round) == 32 for of_round in rounds)


def test_what_differs_by_a_fifth_is_measured_again():
    assert differ([1.0, 0.79]) and not differ([1.0, 0.8]) and not differ([1.0]) and not differ([])


def measure() -> None:
    device = this_device()
    rates = matrix_rates(device, torch.float32)
    assert len(rates) == 3 and min(rates) > 0
    transfers = link_rates([2, 1], device)  # the second rank of the first host has no like on the second
    assert [(one.sender, one.receiver) for one in transfers] == [(0, 1), (1, 0)]
    assert all(one.rate > 0 for one in transfers)


@pytest.mark.slow
def test_ranks_of_hosts_with_other_numbers_of_them_measure_together():
    run_ranks(3, measure)


def alone() -> None:
    assert link_rates([1], this_device()) == []


def test_one_host_has_no_link():
    run_ranks(1, alone)
