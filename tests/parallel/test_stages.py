"""Stages by cost, against exhaustive search and the counts of case B3."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.plan import ParallelPlan
from parallel.stage_split import describe
from parallel.stages import LayerSeconds, Load, balance, boundaries, compare_with_uniform, fold, timed
from tests.parallel.configs import tiny


def compositions(total: int, parts: int):
    """Every way to write total as an ordered sum of positive parts."""
    for cuts in combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield [b - a for a, b in pairwise(edges)]


loads = st.lists(
    st.builds(Load, st.integers(0, 30), st.just(10), st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=4
)


@given(loads, st.integers(4, 9))
def test_no_other_cut_has_a_faster_slowest_stage(stages, blocks):
    found = balance(blocks, stages)
    assert sum(found) == blocks and min(found) >= 1
    cost = lambda counts: max(load.flops(n) for load, n in zip(stages, counts, strict=True))  # noqa: E731
    assert cost(found) == min(cost(counts) for counts in compositions(blocks, len(stages)))


@given(loads, st.integers(4, 9), st.integers(20, 120))
def test_a_memory_limit_is_kept_wherever_a_cut_keeps_it(stages, blocks, limit):
    fits = lambda counts: all(load.bytes(n) <= limit for load, n in zip(stages, counts, strict=True))  # noqa: E731
    if any(fits(counts) for counts in compositions(blocks, len(stages))):
        assert fits(balance(blocks, stages, memory_limit=limit))
    else:
        assert balance(blocks, stages, memory_limit=limit) == balance(blocks, stages)


@pytest.mark.parametrize(("blocks", "stages"), [(5, 4), (42, 16), (38, 8), (7, 3)])
def test_equal_stages_differ_by_one_block_at_most(blocks, stages):
    counts = balance(blocks, [Load(0, 1)] * stages)
    assert max(counts) - min(counts) <= 1 and sum(counts) == blocks


def test_fewer_blocks_than_stages_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match="2 blocks cannot fill 4 stages"):
        balance(2, [Load(0, 1)] * 4)


def test_a_heavy_head_takes_blocks_off_the_last_stage():
    # The head costs two blocks: 5 + 3 and 3 + 5 blocks' worth, where equal counts would make it 4 and 6.
    assert balance(8, [Load(0, 10), Load(20, 10)]) == [5, 3]


def test_of_equally_fast_cuts_the_one_with_even_memory_is_taken():
    heavy_first = [Load(0, 10, 50, 1), Load(0, 10, 0, 1), Load(0, 10, 0, 1)]
    assert balance(4, heavy_first)[0] == 1


def test_a_large_vocabulary_moves_blocks_forward_in_a_plan():
    config = tiny(model__vocab_size=4096, model__num_layers=8, parallel__pp=2)
    (_, first_end), (second, _) = ParallelPlan.from_config(config, 2).stage_layers
    assert first_end == second
    assert second - 1 > 4  # more than half of the blocks before the head's stage


def test_boundaries_hold_embedding_first_and_norm_and_head_last():
    assert boundaries([2, 1, 1]) == ((0, 3), (3, 4), (4, 7))
    assert boundaries([4]) == ((0, 7),)


def test_folding_keeps_each_ranks_blocks_and_splits_them_evenly():
    assert fold([4, 4], head_in_blocks=0.0) == [2, 2, 2, 2]
    counts = [3, 5, 4]
    virtual = fold(counts, head_in_blocks=1.0)
    assert [virtual[r] + virtual[5 - r] for r in range(3)] == counts
    assert virtual[0] == 2 and virtual[5] == 1  # two blocks against one and a head worth one


def test_folding_leaves_a_block_in_every_virtual_stage():
    assert min(fold([2, 2], head_in_blocks=7.0)) == 1


def test_dualpipev_balances_the_pairs_of_stages():
    config = tiny(model__num_layers=8, model__vocab_size=2048, parallel__pp=2, parallel__schedule="dualpipev")
    blocks = [last - first for first, last in ParallelPlan.from_config(config, 2).stage_layers]
    # Rank 0 holds the head (about 5 blocks at this vocabulary) and so fewer blocks than rank 1.
    assert (blocks[0] - 1) + (blocks[3] - 2) < blocks[1] + blocks[2]


def test_uniform_gives_the_first_ranks_one_block_more():
    assert compare_with_uniform([2, 3], [Load(0, 1)] * 2).uniform == (3, 2)
    assert compare_with_uniform([4, 3, 3, 1], [Load(0, 1)] * 4).uniform == (3, 3, 3, 2)


def test_a_split_is_shown_beside_uniform_by_its_slowest_rank():
    found = compare_with_uniform([5, 3], [Load(0, 10), Load(20, 10)])
    assert (found.slowest, found.slowest_of_uniform, found.gain) == (50, 60, 1.2)


@given(loads, st.integers(4, 9))
def test_no_balanced_split_is_slower_than_uniform(stages, blocks):
    assert compare_with_uniform(balance(blocks, stages), stages).gain >= 1


def test_measured_times_take_the_place_of_flops_and_leave_bytes():
    seconds = LayerSeconds(embedding=1e-3, block=2e-3, head=10e-3)
    of = [Load(0, 7, 100, 9), Load(5, 7, 200, 9)]
    assert timed(of, seconds, head_on=-1) == [Load(1_000_000, 2_000_000, 100, 9), Load(10_000_000, 2_000_000, 200, 9)]
    assert timed(of, seconds, head_on=0)[0].fixed_flops == 11_000_000


def test_a_plan_is_balanced_by_measured_times_where_they_are_given():
    config = tiny(model__num_layers=8, parallel__pp=2)
    config.parallel.stages = "profile"
    light = ParallelPlan.from_config(config, 2, layer_seconds=LayerSeconds(0.0, 2e-3, 0.0))
    heavy = ParallelPlan.from_config(config, 2, layer_seconds=LayerSeconds(0.0, 2e-3, 8e-3))
    assert light.stage_layers == ((0, 5), (5, 11)) and heavy.stage_layers == ((0, 7), (7, 11))
    # 6 blocks against 2 and the head: 12 ms each; uniform: 4 blocks and the head, 16 ms.
    assert describe(config, heavy) == (
        "by measured times (embedding 0 ms, block 2 ms, norm, head and loss 8 ms): slowest stage 12 ms a micro-batch; "
        "uniform split 4, 4 blocks: 16 ms, 1.33 x"
    )
    assert describe(config, light).endswith("slowest stage 8 ms a micro-batch, as uniform")


def test_flops_and_stages_by_hand_are_shown_beside_uniform_too():
    config = tiny(model__vocab_size=4096, model__num_layers=8, parallel__pp=2)
    assert describe(config, ParallelPlan.from_config(config, 2)).startswith("by predicted FLOPs: slowest stage ")
    config.parallel.stages = [2, 6]
    assert describe(config, ParallelPlan.from_config(config, 2)).startswith("given by hand: slowest stage ")


def test_under_dualpipev_the_measured_embedding_and_head_are_both_on_rank_0():
    config = tiny(model__num_layers=12, parallel__pp=2, parallel__schedule="dualpipev", train__global_batch_size=8)
    config.parallel.stages = "profile"
    plan = ParallelPlan.from_config(config, 2, layer_seconds=LayerSeconds(1e-3, 1e-3, 3e-3))
    blocks = [last - first for first, last in plan.stage_layers]
    # Rank 0: 4 blocks, embedding 1 and head 3; rank 1: 8 blocks. Rank 0's halves: embedding and 3; 1 and the head.
    assert (blocks[0] - 1, blocks[1], blocks[2], blocks[3] - 2) == (3, 4, 4, 1)
