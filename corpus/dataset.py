"""Samples: fixed-length windows of a token stream, in an order that is a pure function of (seed, index).

S sequence length. Sample k of a stream covers its places [k*S, k*S+S] inclusive: S inputs and their S targets, so the
last target of one sample is the first input of the next and each target is used once an epoch; a final partial sample
is left out and reported (`dropped_tokens`). Index i counts draws for ever: epoch i // len, and each epoch is a fresh
permutation. No state, no random generator: resuming at sample n is asking for sample n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from corpus.order import Interleave, order_key, permute
from corpus.token_file import TokenStream, document_starts

IGNORED = -100  # label of a target that does not count


@dataclass(frozen=True)
class Sample:
    """tokens int64 [S+1]; positions int64 [S], 0 where a document starts; loss_mask bool [S] or None (all count)."""

    tokens: np.ndarray
    positions: np.ndarray
    loss_mask: np.ndarray | None

    @property
    def inputs(self) -> np.ndarray:
        """[S]: all tokens but the last."""
        return self.tokens[:-1]

    @property
    def labels(self) -> np.ndarray:
        """[S]: the next tokens, IGNORED where they do not count."""
        return self.tokens[1:] if self.loss_mask is None else np.where(self.loss_mask, self.tokens[1:], IGNORED)


class Inputs(Protocol):
    """A sample as batches need it, int64 [S] each: `Sample`, or one of masked language modelling."""

    @property
    def inputs(self) -> np.ndarray: ...

    @property
    def labels(self) -> np.ndarray: ...

    @property
    def positions(self) -> np.ndarray: ...


class Dataset(Protocol):
    """What batches need: `sample` for any index from 0 on, and the number of samples of one epoch."""

    sequence_length: int

    def sample(self, index: int) -> Inputs: ...

    def __len__(self) -> int: ...


class SampleStream:
    """The samples of one token stream.

    With mask_documents positions restart at each document and the target of an end-of-document token, which belongs to
    the next, unrelated document, is masked; without, the stream is one text. number: of the stream in its blend, so
    that equal streams get different orders; name: for messages.
    """

    def __init__(
        self,
        tokens: TokenStream,
        *,
        sequence_length: int,
        seed: int,
        shuffle: bool,
        mask_documents: bool,
        number: int = 0,
        name: str = "the corpus",
    ) -> None:
        if sequence_length < 1:
            raise ValueError(f"data.sequence_length={sequence_length} must be at least 1")
        self.tokens, self.sequence_length, self.number = tokens, sequence_length, number
        self.seed, self.shuffle, self.mask_documents = seed, shuffle, mask_documents
        self._samples = max(0, len(tokens) - 1) // sequence_length
        if self._samples == 0:
            raise ValueError(
                f"{name}: {len(tokens)} tokens are fewer than one sample of data.sequence_length={sequence_length} + 1;"
                " add text, lower data.sequence_length" + ("" if shuffle else " or raise data.validation_fraction")
            )

    def __len__(self) -> int:
        return self._samples

    @property
    def dropped_tokens(self) -> int:
        """Targets at the end of the stream that fill no whole sample."""
        return len(self.tokens) - 1 - self._samples * self.sequence_length

    def sample_id(self, index: int) -> int:
        """Which window of the stream draw `index` is."""
        epoch, place = divmod(index, self._samples)
        if not self.shuffle:
            return place
        return permute(place, size=self._samples, key=order_key(self.seed, self.number, epoch))

    def sample(self, index: int) -> Sample:
        size = self.sequence_length
        return window(self.tokens, self.sample_id(index) * size, size, mask_documents=self.mask_documents)


def window(stream: TokenStream, start: int, size: int, *, mask_documents: bool) -> Sample:
    """The sample of `size` inputs from place `start` of a stream on."""
    tokens = stream.read(start, start + size + 1)
    positions = np.arange(size, dtype=np.int64)
    if not mask_documents:
        return Sample(tokens, positions, None)
    starts = document_starts(stream, start + 1, start + size + 1) - start
    if len(starts) == 0:
        return Sample(tokens, positions, None)
    loss_mask = np.ones(size, dtype=bool)
    loss_mask[starts - 1] = False
    origin = np.zeros(size, dtype=np.int64)
    inside = starts[starts < size]
    origin[inside] = inside
    return Sample(tokens, positions - np.maximum.accumulate(origin), loss_mask)


class Stream(Dataset, Protocol):
    """A dataset with an order: sample_id(index) is the place that draw `index` comes from."""

    @property
    def dropped_tokens(self) -> int: ...

    def sample_id(self, index: int) -> int: ...


class Blend:
    """Several streams drawn by weight; each stream keeps its own epochs."""

    def __init__(self, streams: Sequence[Stream], *, weights: Sequence[float]) -> None:
        if len({stream.sequence_length for stream in streams}) != 1 or len(streams) != len(weights):
            raise ValueError("a blend needs one weight a stream and one sequence length")
        self.streams = tuple(streams)
        self.sequence_length = streams[0].sequence_length
        self.interleave = Interleave(weights)

    def __len__(self) -> int:
        """Samples before any stream has to repeat one; for one stream its whole epoch."""
        low, high = 0, sum(map(len, self.streams))
        while low < high:
            middle = (low + high + 1) // 2
            fits = all(n <= len(s) for n, s in zip(self.interleave.counts(middle), self.streams, strict=True))
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def sample_id(self, index: int) -> tuple[int, int]:
        """(stream, window of that stream) of draw `index`."""
        source, place = self.interleave.place(index)
        return source, self.streams[source].sample_id(place)

    def sample(self, index: int) -> Inputs:
        if index < 0:
            raise ValueError(f"sample index {index} must not be negative")
        source, place = self.interleave.place(index)
        return self.streams[source].sample(place)

    def epochs(self, samples: int) -> list[float]:
        """How often each stream has been gone through after `samples` draws."""
        counts = self.interleave.counts(samples)
        return [count / len(stream) for count, stream in zip(counts, self.streams, strict=True)]


Ranges = Sequence[tuple[int, int]]


def merged_ranges(ranges: Ranges) -> tuple[tuple[int, int], ...]:
    """[first, last) ranges sorted, with those that touch joined."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def passed_over_place(index: int, ranges: Ranges) -> int:
    """The index that draw `index` has in a dataset some of whose draws (merged `ranges`) are left out."""
    for first, last in ranges:
        if index >= first:
            index += last - first
    return index


class PassedOver:
    """A dataset without the draws in `ranges`, merged [first, last) ones: those after move up."""

    def __init__(self, dataset: Dataset, ranges: Ranges) -> None:
        self.dataset, self.ranges = dataset, ranges
        self.sequence_length = dataset.sequence_length

    def sample(self, index: int) -> Inputs:
        return self.dataset.sample(passed_over_place(index, self.ranges))

    def __len__(self) -> int:
        return len(self.dataset)
