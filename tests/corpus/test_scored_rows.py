"""Which predictions count: every token once, with as much before it as the definition says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from conf.schema import BadLine
from corpus.batches import IGNORED
from corpus.dataset import Blend, SampleStream
from corpus.scored_rows import Row, continuation_row, dataset_rows, overlapping_rows, stream_rows
from corpus.scored_texts import texts_of, token_stream
from corpus.token_file import TokenFile
from corpus.tokenizer import ByteTokenizer


def scored_by_hand(length: int, size: int, stride: int) -> dict[int, int]:
    """Place of each predicted token -> how many tokens are before it in its window, from Megatron's definition: window
    i holds places i * stride .. i * stride + size; of i = 0 all predictions count, of later ones those that end it.
    """
    context = {}
    for index in range(length):
        for inside in range(size):
            place = index * stride + inside + 1
            if place < length and (index == 0 or inside >= size - stride):
                assert place not in context, "predicted twice"
                context[place] = inside + 1
    return context


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_overlapping_windows_predict_every_token_once_with_the_context_of_the_definition(size):
    for length in range(2, 30):
        tokens = np.arange(100, 100 + length)
        for stride in range(1, size + 1):
            found = {}
            for row in overlapping_rows(tokens, sequence_length=size, stride=stride, limit=None):
                assert len(row.targets), "a window that scores nothing"
                for inside, label in enumerate(row.labels):
                    if label != IGNORED:
                        assert row.tokens[inside] == label - 1
                        found[int(label) - 100] = inside + 1
            assert found == scored_by_hand(length, size, stride)


def test_windows_that_would_leave_gaps_are_refused():
    with pytest.raises(ValueError, match=r"overlapping_eval=9 leaves gaps between windows of 8 tokens; use 1 to 8"):
        list(overlapping_rows(np.arange(20), sequence_length=8, stride=9, limit=None))


def documents(*lengths: int) -> TokenFile:
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    return TokenFile(tokens, np.cumsum(lengths))


@pytest.mark.parametrize("mask", [True, False])
def test_a_stream_is_cut_as_training_cuts_it_and_its_end_counts_too(mask):
    stream = documents(7, 3, 12, 1, 6)
    dataset = SampleStream(stream, sequence_length=8, seed=1, shuffle=False, mask_documents=mask)
    whole = list(dataset_rows(Blend([dataset], weights=[1.0]), limit=None))
    rows = list(stream_rows(stream, sequence_length=8, mask_documents=mask, limit=None))
    assert len(rows) == len(whole) + 1
    for one, other in zip(rows, whole, strict=False):
        for name in ("tokens", "labels", "positions"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    predicted = np.concatenate([row.targets for row in rows]).tolist()
    starts = {7, 10, 22, 23} if mask else set()  # the first token of a document has nothing before it
    assert predicted == [place for place in range(1, 29) if place not in starts]


def test_a_limit_takes_the_first_rows():
    stream = documents(40)
    rows = list(stream_rows(stream, sequence_length=8, mask_documents=True, limit=2))
    assert [row.tokens[0] for row in rows] == [0, 8]
    assert [row.tokens[0] for row in overlapping_rows(np.arange(40), sequence_length=8, stride=3, limit=2)] == [0, 3]


def test_a_continuation_keeps_the_nearest_context():
    row = continuation_row(np.arange(10), np.array([50, 51]), sequence_length=4)
    assert row.tokens.tolist() == [7, 8, 9, 50] and row.labels.tolist() == [IGNORED, IGNORED, 50, 51]
    short = continuation_row(np.array([3]), np.array([50]), sequence_length=4)
    assert short.tokens.tolist() == [3] and short.targets.tolist() == [50]
    with pytest.raises(ValueError, match="0 tokens before 1"):
        continuation_row(np.array([], int), np.array([1]), sequence_length=4)
    with pytest.raises(ValueError, match="5 tokens to predict are more than the 4"):
        continuation_row(np.array([1]), np.arange(5), sequence_length=4)


def test_texts_of_files_become_the_stream_that_training_would_read(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("ab", "", "cé")))
    stream = token_stream(
        texts_of(str(tmp_path / "a.jsonl"), text_column="text", bad_lines=BadLine.fail), ByteTokenizer(), what="a"
    )
    assert stream.tokens.tolist() == [97, 98, 256, 99, 0xC3, 0xA9, 256] and stream.ends.tolist() == [3, 7]


def test_files_that_cannot_be_scored_are_named_with_the_knob(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    for path, column, words in (
        ("nowhere.txt", "text", "evaluate.files path=.*nowhere.txt: no file matches"),
        ("a.jsonl", "text", "a.jsonl: no column 'text'; it has body: set evaluate.text_column$"),
    ):
        with pytest.raises(ValueError, match=words):
            list(texts_of(str(tmp_path / path), text_column=column, bad_lines=BadLine.fail))
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"evaluate.files path=e: holds no text"):
        token_stream(
            texts_of(str(tmp_path / "empty.txt"), text_column="text", bad_lines=BadLine.fail), ByteTokenizer(), what="e"
        )


def test_targets_are_the_labels_that_count():
    assert Row(np.arange(3), np.array([1, IGNORED, 3])).targets.tolist() == [1, 3]
