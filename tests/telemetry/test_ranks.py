"""What all ranks saw, to metrics: every number worked out by hand."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from telemetry.ranks import CollectiveReport, RankReport, RanksReport, median_of_others

MB = 10**6


def rank(number: int, *, pp: int, compute_s: float, **changes: Any) -> RankReport:
    values: dict[str, Any] = dict(
        rank=number, host=f"host{number // 2}", pp=pp, dp=0, tp=number % 2, step_s=2.0, compute_s=compute_s,
        recompute_s=0.0, waiting_s=0.2, communication_s=0.1, memory_bytes=50 * MB, peak_bytes=100 * MB,
        growth_bytes=60 * MB,
    )  # fmt: skip
    return RankReport(**values | changes)


def four(**of_last: Any) -> RanksReport:
    """Two stages of two ranks; rank 3 is the slow one."""
    return RanksReport(
        [
            rank(0, pp=0, compute_s=1.0, waiting_s=0.6),
            rank(1, pp=0, compute_s=1.0, waiting_s=0.4, peak_bytes=110 * MB, growth_bytes=75 * MB),
            rank(2, pp=1, compute_s=1.2, recompute_s=0.4),
            rank(3, pp=1, compute_s=1.8, recompute_s=0.6, **of_last),
        ],
        ledger=[50 * MB, 60 * MB],
    )


def test_bubble_imbalance_and_recomputation_by_stage_and_for_the_run():
    found = four().as_metrics()
    assert found["pipeline/bubble/stage0"] == pytest.approx(0.5 / 2)  # mean of 0.6 and 0.4 s of 2 s
    assert found["pipeline/bubble/stage1"] == pytest.approx(0.2 / 2)
    assert found["pipeline/bubble"] == pytest.approx((0.25 + 0.1) / 2)
    assert found["pipeline/imbalance"] == pytest.approx(1.5 / 1.25)  # stages 1.0 and 1.5 s
    assert found["pipeline/recompute_share"] == pytest.approx(1.0 / 5.0)
    assert found["pipeline/compute_s/stage1"] == pytest.approx(1.5)


def test_the_slow_rank_is_named_with_its_host_beside_its_peers_alone():
    """Rank 2 computes longer than stage 0 does, but that is its stage's work."""
    report = four()
    assert (report.slowest.rank, report.slowest.host) == (3, "host1")
    assert report.slowest.slowdown == pytest.approx(1.8 / 1.2)
    assert (report.as_metrics()["ranks/slowdown"], report.as_metrics()["ranks/slowest"]) == (pytest.approx(1.5), 3)


def test_a_rank_without_peers_is_no_straggler():
    report = RanksReport([rank(0, pp=0, compute_s=1.0), rank(1, pp=1, compute_s=5.0)])
    assert report.slowest.slowdown == 1.0


def test_memory_is_the_largest_ranks_beside_the_ledger():
    found = four().as_metrics()
    assert found["memory/peak_bytes"] == 110 * MB == found["memory/peak_bytes/stage0"]
    assert found["memory/of_ledger/stage0"] == pytest.approx(75 / 50)
    assert found["memory/of_ledger/stage1"] == pytest.approx(60 / 60)


def test_of_each_collective_the_stage_with_most_counts_whatever_the_clock_says():
    """Calls and bytes are the plan's: they must not jump from stage to stage with the noise of seconds."""
    calls = [CollectiveReport("tensor", "all_reduce", 8, 4000, 0.2)]
    few = [CollectiveReport("tensor", "all_reduce", 3, 100, 0.9)]
    ranks = [
        rank(0, pp=0, compute_s=1.0, collectives=few), rank(1, pp=0, compute_s=1.0),
        rank(2, pp=1, compute_s=1.0, collectives=calls), rank(3, pp=1, compute_s=1.0, communication_s=0.5),
    ]  # fmt: skip
    found = RanksReport(ranks).as_metrics()
    assert found["communication/tensor/all_reduce/calls"] == 4  # rank 3 made none
    assert found["communication/tensor/all_reduce/bytes"] == 2000
    assert found["communication/tensor/all_reduce/seconds"] == pytest.approx(0.45)
    assert found["communication/exposed_share"] == pytest.approx((0.5 + 0.1) / 2 / 2.0)
    kept = ranks[2].as_row()["collectives"]
    assert kept == {"tensor/all_reduce": {"calls": 8, "bytes": 4000, "seconds": 0.2}}


def test_time_of_calls_beside_the_computation_is_not_made_up():
    calls = [CollectiveReport("data", "reduce_scatter", 2, 100, None)]
    found = four(collectives=calls, in_flight_s=1.0).as_metrics()
    assert "communication/data/reduce_scatter/seconds" not in found and "communication/overlap_share" not in found
    assert found["communication/data/reduce_scatter/bytes"] == 50


@pytest.mark.parametrize(("still", "share"), [(0.2, 0.6), (0.5, 0.0)])
def test_overlap_is_the_time_in_flight_that_did_not_hold_up_computation(still, share):
    """What is waited for where it is called hides nothing."""
    calls = [CollectiveReport("data", "all_reduce", 2, 100, still), CollectiveReport("pipe", "send_recv", 1, 9, 3.0)]
    found = four(collectives=calls, in_flight_s=0.5).as_metrics()
    assert found["communication/overlap_share"] == pytest.approx(share)


@pytest.mark.parametrize("count", [2, 3, 6, 7])
def test_the_median_of_the_others_is_that_of_a_list_without_the_one(count: int) -> None:
    values = [float((7 * n) % 5) for n in range(count)]
    for place, one in enumerate(values):
        assert median_of_others(sorted(values), one) == median(values[:place] + values[place + 1 :])
    assert median_of_others([1.0], 1.0) is None
