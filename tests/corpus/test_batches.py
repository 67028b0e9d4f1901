"""Batches: the same global batch under every plan, no random state touched, errors that come out."""

import random
from contextlib import closing

import numpy as np
import pytest
import torch

from conf.schema import Config, ModelConfig, ParallelConfig, TrainConfig
from corpus.batches import IGNORED, StepBatches, batch, evaluation_batches, micro_batches
from parallel.plan import ParallelPlan
from tests.corpus.helpers import Plan, constant_samples, stream, token_file


def ids(step):
    return [int(row[0]) for part in step for row in part.tokens_BS]


def global_batch(dataset, plan, first_sample):
    """Sample ids in the order of their index, put together from what each data rank reads."""
    parts = [
        micro_batches(dataset, plan=plan, first_sample=first_sample, data_rank=rank)
        for rank in range(plan.data_parallel_size)
    ]
    return [i for m in range(plan.num_micro_batches) for part in parts for i in ids([part[m]])]


def test_labels_are_the_next_tokens_and_masked_where_a_document_ends():
    samples = stream(token_file([[1, 2], [3, 4, 5], [6]], eod=9), sequence_length=7, shuffle=False)
    got = batch(samples, indices=[0])
    assert got.tokens_BS.tolist() == [[1, 2, 9, 3, 4, 5, 9]]
    assert got.labels_BS.tolist() == [[2, 9, IGNORED, 4, 5, 9, IGNORED]]
    assert got.positions_BS.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert {t.dtype for t in (got.tokens_BS, got.labels_BS, got.positions_BS)} == {torch.int64}
    assert got.tokens_BS.is_contiguous() and got.labels_BS.is_contiguous()


@pytest.mark.parametrize("micro_batch_size", [1, 2])
@pytest.mark.parametrize("data_parallel_size", [1, 2, 4])
def test_the_global_batch_and_its_order_do_not_depend_on_the_data_parallel_size(data_parallel_size, micro_batch_size):
    dataset = constant_samples(40)
    number = 8 // (data_parallel_size * micro_batch_size)
    plan = Plan(micro_batch_size, data_parallel_size, number)
    got = [i for step in range(7) for i in global_batch(dataset, plan, step * 8)]
    assert got == [dataset.sample_id(i) for i in range(56)]


def test_data_ranks_are_disjoint_and_their_union_is_the_start_of_the_epoch_permutation():
    dataset, plan = constant_samples(40), Plan(1, 2, 4)
    seen = {rank: [] for rank in range(2)}
    for step in range(5):
        for rank in range(2):
            seen[rank] += ids(micro_batches(dataset, plan=plan, first_sample=8 * step, data_rank=rank))
    assert not set(seen[0]) & set(seen[1])
    assert set(seen[0]) | set(seen[1]) == {dataset.sample_id(i) for i in range(40)} == set(range(40))


def test_ranks_of_one_data_rank_read_the_same_samples_wherever_they_sit():
    config = Config(
        model=ModelConfig(num_layers=4),
        parallel=ParallelConfig(tp=2, pp=2),
        train=TrainConfig(micro_batch_size=2, global_batch_size=8),
    )
    plan = ParallelPlan.from_config(config, 8)
    dataset = constant_samples(40)
    seen = {}
    for rank in range(8):
        _, data_rank, _ = plan.coordinate(rank)
        got = tuple(ids(micro_batches(dataset, plan=plan, first_sample=8, data_rank=data_rank)))
        seen.setdefault(data_rank, set()).add(got)
    assert {len(kinds) for kinds in seen.values()} == {1}  # first and last stage, all tensor ranks
    assert sorted(i for (kind,) in seen.values() for i in kind) == sorted(dataset.sample_id(i) for i in range(8, 16))


def test_files_of_unequal_length_give_equal_step_counts_as_in_case_e2():
    dataset, plan = constant_samples(15), Plan(1, 2, 1)  # 5 + 1 + 9 rows of one sample each
    steps = [
        [ids(micro_batches(dataset, plan=plan, first_sample=2 * s, data_rank=r)) for r in (0, 1)] for s in range(7)
    ]
    assert len({i for step in steps for rank in step for i in rank}) == 14
    wrapped = global_batch(dataset, plan, 14)  # the epoch's last sample and the first of the next, no rank without one
    assert wrapped == [dataset.sample_id(14), dataset.sample_id(15)]


@pytest.mark.parametrize("data_parallel_size", [1, 2])
def test_a_resumed_run_reads_on_where_it_stopped(data_parallel_size):
    dataset = constant_samples(20)
    plan = Plan(1, data_parallel_size, 2 // data_parallel_size)
    for rank in range(data_parallel_size):
        with closing(StepBatches(dataset, plan=plan, data_rank=rank)) as whole:
            expected = [(first, ids(step)) for (first, step), _ in zip(whole, range(20), strict=False)]
        with closing(StepBatches(dataset, plan=plan, data_rank=rank, first_sample=26)) as resumed:
            assert [(first, ids(step)) for (first, step), _ in zip(resumed, range(7), strict=False)] == expected[13:]


def test_no_random_generator_is_touched():
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    with closing(StepBatches(constant_samples(20), plan=Plan(2, 2, 2), data_rank=1)) as steps:
        for _ in range(9):
            next(steps)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all() and before[2] == random.getstate()


def test_batch_ramp_up_changes_the_step_and_loses_no_sample():
    dataset, plan = constant_samples(40), Plan(1, 2, 4, ramp=((4, 1), (12, 2)))
    firsts, seen = [], []
    readers = [StepBatches(dataset, plan=plan, data_rank=rank) for rank in (0, 1)]
    with closing(readers[0]) as zero, closing(readers[1]) as one:
        for _ in range(6):
            (first, a), (also_first, b) = next(zero), next(one)
            assert first == also_first
            firsts.append(first)
            seen += [i for pair in zip(a, b, strict=True) for i in ids(pair)]
    assert firsts == [0, 2, 4, 8, 12, 20]
    assert seen == [dataset.sample_id(i) for i in range(28)]


def test_an_error_in_the_reading_thread_comes_out_of_next():
    class Broken:
        sequence_length = 4

        def __len__(self):
            return 100

        def sample(self, index):
            if index >= 4:
                raise OSError("disk gone")
            return constant_samples(4).sample(index)

    steps = StepBatches(Broken(), plan=Plan(1, 1, 2), data_rank=0)
    next(steps), next(steps)
    with pytest.raises(OSError, match="disk gone"):
        next(steps)
    assert list(steps) == []
    assert not steps._thread.is_alive()


def test_close_ends_the_thread_with_steps_left():
    steps = StepBatches(constant_samples(20), plan=Plan(1, 1, 1), data_rank=0)
    next(steps)
    steps.close()
    steps.close()
    assert not steps._thread.is_alive() and list(steps) == []


def test_a_batch_larger_than_the_corpus_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"7 samples.*fewer than one batch of train.global_batch_size=8"):
        micro_batches(constant_samples(7), plan=Plan(1, 2, 4), first_sample=0, data_rank=0)


@pytest.mark.parametrize(
    ("data_parallel_size", "micro_batch_size", "multiple"), [(1, 1, 1), (2, 1, 1), (2, 2, 4), (4, 2, 1)]
)
def test_evaluation_scores_the_same_targets_under_every_plan(data_parallel_size, micro_batch_size, multiple):
    dataset = constant_samples(13, shuffle=False)
    plan = Plan(micro_batch_size, data_parallel_size, 1)
    labels, lengths = [], set()
    for rank in range(data_parallel_size):
        parts = evaluation_batches(dataset, plan=plan, data_rank=rank, num_samples=11, micro_batch_multiple=multiple)
        lengths.add(len(parts))
        labels += [label for part in parts for label in part.labels_BS.flatten().tolist() if label != IGNORED]
        assert all(part.tokens_BS.shape == (micro_batch_size, 4) for part in parts)
    expected = [int(label) for k in range(11) for label in dataset.sample(k).tokens[1:]]
    assert sorted(labels) == sorted(expected)
    assert len(lengths) == 1 and lengths.pop() % multiple == 0


def test_evaluation_of_more_samples_than_there_are_takes_each_once():
    parts = evaluation_batches(constant_samples(3, shuffle=False), plan=Plan(1, 1, 1), data_rank=0, num_samples=64)
    assert ids(parts) == [0, 1, 2]
