"""Conversations on disk, memory-mapped, and the samples that they make.

Five plain files a split: NAME.bin and NAME.ends as in token_file.py (no end-of-document token is added: a conversation
brings its own), NAME.counts one byte a token, NAME.members the conversations of each sample one after the other,
NAME.sample_ends where each sample's end among them. Integrity is cache.py's business.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from corpus.conversations import Conversation
from corpus.dataset import Sample
from corpus.order import order_key, permute
from corpus.packing import mixed, packed
from corpus.token_file import Array, map_array


class ConversationWriter:
    """Writes one split; `close` packs it."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype) -> None:
        self.folder, self.split, self.dtype = folder, split, dtype
        self.lengths: list[int] = []
        self.text_bytes = self.num_loss_tokens = self.num_samples = 0
        self._bin = open(folder / f"{split}.bin", "wb")  # noqa: SIM115 (closed by `close`)
        self._counts = open(folder / f"{split}.counts", "wb")  # noqa: SIM115

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def write(self, one: Conversation) -> None:
        self._bin.write(one.ids.astype(self.dtype, copy=False).tobytes())
        self._counts.write(one.counts.astype(np.uint8).tobytes())
        self.lengths.append(len(one.ids))
        self.num_loss_tokens += int(one.counts[1:].sum())  # nothing comes before the first
        self.text_bytes += one.num_bytes

    def close(self, *, sequence_length: int, packing: bool) -> None:
        """Decide the samples and write the rest."""
        for file in (self._bin, self._counts):
            file.flush()
            os.fsync(file.fileno())
            file.close()
        if packing:
            samples = packed(self.lengths, size=sequence_length)
        else:
            samples = mixed([[place] for place in range(len(self.lengths))])
        self.num_samples = len(samples)
        members = [place for sample in samples for place in sample]
        for name, numbers in (
            ("ends", np.cumsum(self.lengths)),
            ("members", members),
            ("sample_ends", np.cumsum([len(sample) for sample in samples])),
        ):
            np.asarray(numbers, "<i8").tofile(self.folder / f"{self.split}.{name}")


@dataclass(frozen=True)
class ConversationFile:
    """tokens [N], counts [N]; ends [conversations]; members [conversations], sample_ends [samples]."""

    tokens: Array
    counts: Array
    ends: Array
    members: Array
    sample_ends: Array

    @classmethod
    def open(cls, folder: Path, *, split: str, dtype: str) -> ConversationFile:
        kinds = {"bin": dtype, "counts": "u1", "ends": "<i8", "members": "<i8", "sample_ends": "<i8"}
        return cls(*(map_array(folder / f"{split}.{name}", np.dtype(kind)) for name, kind in kinds.items()))

    def __len__(self) -> int:
        return len(self.sample_ends)

    def conversations(self, sample: int) -> list[tuple[Array, Array]]:
        """(ids int64, counts bool) of each conversation of a sample."""
        first = int(self.sample_ends[sample - 1]) if sample else 0
        found = []
        for place in self.members[first : int(self.sample_ends[sample])].tolist():
            start, stop = int(self.ends[place - 1]) if place else 0, int(self.ends[place])
            found.append((self.tokens[start:stop].astype(np.int64), self.counts[start:stop].astype(bool)))
        return found


class ConversationStream:
    """The samples of one file: whole conversations side by side, each a document, then padding that is none of theirs.

    Positions restart at each conversation and at the padding. The target of a conversation's last token belongs to the
    next one and never counts. Order as in corpus.dataset.SampleStream: a pure function of (seed, index).
    """

    dropped_tokens = 0  # all of a conversation that was written is in a sample

    def __init__(
        self,
        file: ConversationFile,
        *,
        sequence_length: int,
        seed: int,
        shuffle: bool,
        padding_id: int,
        number: int = 0,
    ) -> None:
        self.file, self.sequence_length, self.padding_id = file, sequence_length, padding_id
        self.seed, self.shuffle, self.number = seed, shuffle, number

    def __len__(self) -> int:
        return len(self.file)

    def sample_id(self, index: int) -> int:
        """Which sample of the file draw `index` is."""
        epoch, place = divmod(index, len(self))
        if not self.shuffle:
            return place
        return permute(place, size=len(self), key=order_key(self.seed, self.number, epoch))

    def sample(self, index: int) -> Sample:
        size = self.sequence_length
        tokens = np.full(size + 1, self.padding_id, dtype=np.int64)
        positions = np.zeros(size, dtype=np.int64)
        loss_mask = np.zeros(size, dtype=bool)
        start = 0
        for ids, counts in self.file.conversations(self.sample_id(index)):
            stop = start + len(ids)
            tokens[start:stop] = ids
            positions[start:stop] = np.arange(len(ids))
            loss_mask[start : stop - 1] = counts[1:]
            start = stop
        positions[start:] = np.arange(size - start)
        return Sample(tokens, positions, loss_mask)
