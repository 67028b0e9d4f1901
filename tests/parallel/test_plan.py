"""Numbers that a plan derives."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest

from parallel.plan import ParallelPlan, padded_vocab_size
from tests.parallel.configs import tiny


def test_data_parallel_size_and_micro_batches_follow_from_the_world():
    plan = ParallelPlan.from_config(tiny(parallel__tp=2, parallel__pp=2, train__global_batch_size=24), 12)
    assert (plan.data_parallel_size, plan.num_micro_batches) == (3, 8)


@pytest.mark.parametrize(("tp", "rows"), [(1, 264), (2, 272), (3, 264), (4, 288)])
def test_a_vocabulary_of_259_is_padded_to_the_measured_sizes(tp, rows):
    assert padded_vocab_size(259, divisor=8, tp=tp) == rows  # case A6


def test_a_plan_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ParallelPlan.from_config(tiny(), 1).global_batch_size = 3  # type: ignore[misc]


def test_the_layer_list_is_covered_without_gap_from_embedding_to_head():
    for pp in (1, 2, 3, 4):
        stages = ParallelPlan.from_config(tiny(parallel__pp=pp), pp).stage_layers
        assert stages[0][0] == 0 and stages[-1][1] == 4 + 3
        assert all(left[1] == right[0] for left, right in pairwise(stages))


def test_stages_by_hand_are_taken_as_given():
    plan = ParallelPlan.from_config(tiny(parallel__pp=2, parallel__stages=[1, 3]), 2)
    assert plan.stage_layers == ((0, 2), (2, 7))


def test_dualpipev_cuts_two_stages_a_rank_and_folds_them():
    plan = ParallelPlan.from_config(tiny(parallel__pp=2, parallel__schedule="dualpipev"), 2)
    assert len(plan.stage_layers) == 4
    assert [plan.stages_of(rank) for rank in range(2)] == [(0, 3), (1, 2)]


def test_the_batch_ramps_up_as_megatrons_does():
    plan = ParallelPlan.from_config(tiny(train__batch_ramp_up=[2, 2, 60]), 1)
    # Three increments over 60 samples: 2 up to 19, 4 up to 39, 6 up to 59, then 8.
    assert [plan.global_batch_size_at(n) for n in (0, 19, 20, 39, 40, 59, 60, 61, 10**9)] == [2, 2, 4, 4, 6, 6, 8, 8, 8]
    assert plan.num_micro_batches_at(20) == 4


def test_the_bubble_is_the_published_formula():
    plan = ParallelPlan.from_config(tiny(parallel__pp=4, train__global_batch_size=8), 4)
    assert plan.bubble == pytest.approx(3 / 11)
