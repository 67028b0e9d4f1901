"""Samples of masked language modelling: whole documents, framed and packed, with tokens masked anew each epoch.

S sequence length. Order as in corpus.dataset.SampleStream. What is masked depends on (seed, epoch, sample) alone, so it
is the same on every rank, under every plan and after a resume, and another in each epoch; draws of a split that is not
shuffled stay in its first epoch, so every evaluation masks the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from corpus.mask_tokens import MaskTokens
from corpus.masking import masked
from corpus.order import order_key, permute
from corpus.packed_documents import PackedDocuments
from corpus.token_file import TokenStream


@dataclass(frozen=True)
class MaskedSample:
    """inputs, labels, positions int64 [S]: labels are the tokens that were masked, at their own places."""

    inputs: np.ndarray
    labels: np.ndarray
    positions: np.ndarray


class MaskedStream:
    """The samples of one token stream.

    With mask_documents positions restart at each document, so that none sees another; without, the sample is one text.
    Padding, the end token again and again, is at the end with positions of its own in any case: nothing sees it.
    """

    dropped_tokens = 0  # all of a document is in some sample

    def __init__(
        self,
        tokens: TokenStream,
        packed: PackedDocuments,
        *,
        sequence_length: int,
        seed: int,
        shuffle: bool,
        mask_documents: bool,
        masks: MaskTokens,
        number: int = 0,
        name: str = "the corpus",
    ) -> None:
        if len(packed) == 0:
            raise ValueError(f"{name} has no document; add text, or change data.validation_fraction")
        self.tokens, self.packed, self.sequence_length, self.masks = tokens, packed, sequence_length, masks
        self.seed, self.shuffle, self.mask_documents, self.number = seed, shuffle, mask_documents, number

    def __len__(self) -> int:
        return len(self.packed)

    def sample_id(self, index: int) -> int:
        """Which packed sample draw `index` is."""
        epoch, place = divmod(index, len(self))
        if not self.shuffle:
            return place
        return permute(place, size=len(self), key=order_key(self.seed, self.number, epoch))

    def whole(self, sample: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens, positions, is_text), each [S], of a packed sample before masking."""
        size, masks = self.sequence_length, self.masks
        tokens = np.full(size, masks.end_id, dtype=np.int64)
        is_text, positions = np.zeros(size, dtype=bool), np.zeros(size, dtype=np.int64)
        at = 0
        for start, stop in self.packed.pieces(sample):
            first, last = at + len(masks.begin), at + len(masks.begin) + stop - start
            tokens[at:first] = masks.begin
            tokens[first:last] = self.tokens.read(start, stop)
            is_text[first:last] = ~masks.is_special[tokens[first:last]]
            positions[at : last + 1] = np.arange(last + 1 - at) + (0 if self.mask_documents else at)
            at = last + 1  # the end token is there already
        positions[at:] = np.arange(size - at)
        return tokens, positions, is_text

    def sample(self, index: int) -> MaskedSample:
        epoch, sample = index // len(self) if self.shuffle else 0, self.sample_id(index)
        tokens, positions, is_text = self.whole(sample)
        key = order_key("mask", self.seed, self.number, epoch, sample)
        inputs, labels = masked(tokens, is_text=is_text, masks=self.masks, key=key)
        return MaskedSample(inputs, labels, positions)
