"""Sequences to score: which tokens a model reads and which of its predictions count. No model.

    dataset_rows        the samples of a validation split, as training evaluates them
    stream_rows         the windows of a stream of documents, its end included
    overlapping_rows    Megatron's sliding window: every token is predicted once, with much before it
    continuation_row    a text after another one: the last word of LAMBADA, an answer of a harness

N tokens of a row, S most tokens that the model sees at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from corpus.batches import IGNORED
from corpus.dataset import Dataset, Inputs, window
from corpus.token_file import TokenStream


@dataclass(frozen=True)
class Row:
    """tokens int64 [N] are read; labels int64 [N]: the token after each, or the one masked there, -100 where it does
    not count; positions int64 [N], 0 where a document starts, None: one document from 0."""

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def targets(self) -> np.ndarray:
        """The tokens whose prediction counts."""
        return self.labels[self.labels != IGNORED]


def dataset_rows(dataset: Dataset, *, limit: int | None) -> Iterator[Row]:
    """The samples of one epoch, the first `limit`."""
    for index in range(len(dataset) if limit is None else min(limit, len(dataset))):
        yield _row(dataset.sample(index))


def stream_rows(stream: TokenStream, *, sequence_length: int, mask_documents: bool, limit: int | None) -> Iterator[Row]:
    """The stream in windows of S tokens as training cuts it, and a shorter last one."""
    starts = range(0, len(stream) - 1, sequence_length)
    for start in starts if limit is None else starts[:limit]:
        size = min(sequence_length, len(stream) - 1 - start)
        yield _row(window(stream, start, size, mask_documents=mask_documents))


def _row(sample: Inputs) -> Row:
    return Row(sample.inputs, sample.labels, sample.positions)


def overlapping_rows(tokens: np.ndarray, *, sequence_length: int, stride: int, limit: int | None) -> Iterator[Row]:
    """tokens int64 [T] of one text -> windows of at most S tokens, each `stride` after the one before it.

    All predictions of the first count, of each later one the last `stride`: each of tokens[1:] once. With stride = S
    windows do not overlap. Source: tasks/zeroshot_gpt of Megatron-LM (its --overlapping-eval). ValueError where the
    stride exceeds S.
    """
    if not 1 <= stride <= sequence_length:
        raise ValueError(
            f"evaluate.overlapping_eval={stride} leaves gaps between windows of {sequence_length} tokens; "
            f"use 1 to {sequence_length}"
        )
    further = max(0, len(tokens) - 1 - sequence_length)
    number = 1 + -(-further // stride)
    for index in range(number if limit is None else min(limit, number)):
        piece = tokens[index * stride : index * stride + sequence_length + 1]
        labels = piece[1:].copy()
        if index > 0:
            labels[: sequence_length - stride] = IGNORED
        yield Row(piece[:-1], labels)


def continuation_row(context: np.ndarray, continuation: np.ndarray, *, sequence_length: int) -> Row:
    """The last S tokens that come before the last one; the predictions of the continuation count.

    ValueError where a token to predict has nothing before it, or the continuation alone is longer than S.
    """
    if len(context) == 0 or len(continuation) == 0:
        raise ValueError(f"{len(context)} tokens before {len(continuation)} to predict: both need one or more")
    if len(continuation) > sequence_length:
        raise ValueError(f"{len(continuation)} tokens to predict are more than the {sequence_length} seen at once")
    whole = np.concatenate([context, continuation]).astype(np.int64)[-(sequence_length + 1) :]
    labels = whole[1:].copy()
    labels[: len(labels) - len(continuation)] = IGNORED
    return Row(whole[:-1], labels)
