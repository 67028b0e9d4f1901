"""The probe of hosts: every two of them meet at most once, and what ranks measured of each other comes out whole."""

from __future__ import annotations

import time
from itertools import combinations

import pytest
import torch
import torch.distributed as dist

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


def held_up() -> None:
    """Every message takes 20 ms, but of one pair one sample, and then a whole attempt, is held up for longer."""
    from engine import probe_hosts

    served, plain = [], dist.send

    def send(message: torch.Tensor, to: int) -> None:
        if message.numel() > 1:
            served.append(1)
            attempt, sample = divmod(len(served) - 1, 2 * probe_hosts.SAMPLES)
            disturbed = dist.get_rank() == 0 and (attempt == 0 or sample % probe_hosts.SAMPLES == 2)
            time.sleep(0.1 if disturbed else 0.02)
        plain(message, to)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "send", send)
        patch.setattr(probe_hosts, "PAUSE_S", 0.05)
        patch.setattr(probe_hosts, "LARGEST", {"cpu": probe_hosts.FIRST_BYTES})
        one, other = link_rates([1, 1], this_device())
    assert not differ([one.rate, other.rate]), (one, other)
    assert len(served) < 4 * 2 * probe_hosts.SAMPLES  # it was measured again, and not without need


def test_neither_a_disturbed_sample_nor_a_disturbed_attempt_decides():
    run_ranks(2, held_up)
