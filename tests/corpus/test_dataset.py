"""Samples of a token stream: nothing lost, nothing doubled, documents kept apart."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus.dataset import Blend
from tests.corpus.helpers import EOD, constant_samples, prepared, stream, token_file, write_jsonl

DOCUMENTS = st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=30), min_size=1, max_size=20)


def test_documents_of_case_e1_give_nine_samples_and_four_dropped_targets(tmp_path):
    texts = ["", "abc", "", "d" * 70, "e"]
    corpus = prepared(tmp_path, write_jsonl(tmp_path / "e1.jsonl", texts))
    (source,) = corpus.sources
    (samples,) = corpus.train.streams
    expected = [*b"abc", EOD, *b"d" * 70, EOD, *b"e", EOD]
    assert len(expected) == 77
    assert list(samples.tokens.tokens) == expected
    assert (len(corpus.train), source.dropped_tokens) == (9, 4)
    assert source.manifest["counts"]["empty"] == 2
    by_window = {samples.sample_id(i): samples.sample(i) for i in range(9)}
    joined = np.concatenate([by_window[k].tokens[:-1] for k in range(9)])
    assert [*joined, by_window[8].tokens[-1]] == expected[:73]


@given(documents=DOCUMENTS, sequence_length=st.integers(1, 12), seed=st.integers(0, 9))
@settings(max_examples=80)
def test_each_target_of_the_stream_is_used_once_an_epoch_but_a_partial_last_sample(documents, sequence_length, seed):
    file = token_file(documents)
    if len(file) <= sequence_length:
        return
    samples = stream(file, sequence_length=sequence_length, seed=seed)
    for epoch in (0, 3):
        first = epoch * len(samples)
        windows = [samples.sample_id(first + i) for i in range(len(samples))]
        assert sorted(windows) == list(range(len(samples)))
        targets = {w: list(samples.sample(first + i).tokens[1:]) for i, w in enumerate(windows)}
        joined = [token for w in range(len(samples)) for token in targets[w]]
        assert joined == list(file.tokens[1 : len(joined) + 1])
        assert len(joined) + samples.dropped_tokens == len(file) - 1
        assert samples.dropped_tokens < sequence_length


@given(documents=DOCUMENTS, sequence_length=st.integers(1, 12))
@settings(max_examples=80)
def test_positions_restart_and_no_target_crosses_into_another_document(documents, sequence_length):
    file = token_file(documents)
    if len(file) <= sequence_length:
        return
    samples = stream(file, sequence_length=sequence_length, shuffle=False)
    for k in range(len(samples)):
        sample = samples.sample(k)
        position, expected_positions, expected_mask = 0, [], []
        for token in sample.tokens[:-1]:  # one token after the other, by the meaning of end of document
            expected_positions.append(position)
            expected_mask.append(token != EOD)
            position = 0 if token == EOD else position + 1
        assert list(sample.positions) == expected_positions
        mask = np.ones(sequence_length, bool) if sample.loss_mask is None else sample.loss_mask
        assert list(mask) == expected_mask


def test_without_document_masks_the_stream_is_one_text():
    samples = stream(token_file([[1], [2, 3], [4]]), sequence_length=6, mask_documents=False)
    sample = samples.sample(0)
    assert list(sample.positions) == [0, 1, 2, 3, 4, 5] and sample.loss_mask is None


def test_epochs_differ_from_each_other_and_between_seeds():
    def order(epoch, seed):
        samples = constant_samples(50, seed=seed)
        return [samples.sample_id(epoch * 50 + i) for i in range(50)]

    orders = [tuple(order(epoch, seed)) for epoch in range(4) for seed in range(4)]
    assert len(set(orders)) == 16
    assert order(2, 1) == order(2, 1)


def test_validation_order_is_the_stream_order():
    samples = constant_samples(5, shuffle=False)
    assert [int(samples.sample(i).tokens[0]) for i in range(7)] == [0, 1, 2, 3, 4, 0, 1]


def test_sample_indices_of_case_d5_are_the_same_after_a_resume_in_the_second_epoch():
    whole = [constant_samples(20).sample_id(i) for i in range(40)]  # 20 steps of 2
    resumed = constant_samples(20)
    assert [resumed.sample_id(i) for i in range(26, 40)] == whole[26:]  # from step 13 on
    assert sorted(whole[20:]) == list(range(20)) and whole[:20] != whole[20:]


def test_a_blend_keeps_the_epochs_of_each_stream():
    small, large = constant_samples(3), constant_samples(30)
    blend = Blend([small, large], weights=[1, 1])
    draws = [blend.sample_id(i) for i in range(60)]
    windows = [window for source, window in draws if source == 0]
    assert len(windows) == 30
    assert all(sorted(windows[i : i + 3]) == [0, 1, 2] for i in range(0, 30, 3))
    assert sorted(window for source, window in draws if source == 1) == list(range(30))
    assert blend.epochs(60) == [10.0, 1.0]
    first_repeat = next(i for i in range(60) if draws[i] in draws[:i])
    assert len(blend) == first_repeat


def test_a_stream_shorter_than_a_sample_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"8 tokens are fewer than one sample of data.sequence_length=8 \+ 1"):
        stream(token_file([[1] * 7]), sequence_length=8)


def test_a_negative_index_is_refused():
    with pytest.raises(ValueError, match="-1"):
        Blend([constant_samples(3)], weights=[1]).sample(-1)
