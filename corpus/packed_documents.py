"""Which documents of a token stream share a sample of masked language modelling, as tables on disk.

A document that fits a sample with its frame is never split; a longer one is cut into pieces that fill samples, and a
rest. Pieces are framed like documents and packed by best fit (`corpus.packing`). Three plain files a split, int64,
little-endian: NAME.starts and NAME.stops are a piece's places in the stream without its end-of-document id, sample
after sample; NAME.sample_ends where each sample's end among them. The ids stay where they are. Integrity is cache.py's
business.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from corpus.packing import packed
from corpus.token_file import Array, map_array

FORMAT = 1  # of the tables; raise it when their meaning changes


@dataclass(frozen=True)
class PackedDocuments:
    """starts, stops: [pieces]; sample_ends: [samples]."""

    starts: Array
    stops: Array
    sample_ends: Array

    @classmethod
    def open(cls, folder: Path, *, split: str) -> PackedDocuments:
        tables = (folder / f"{split}.{name}" for name in ("starts", "stops", "sample_ends"))
        return cls(*(map_array(table, np.dtype("<i8")) for table in tables))

    def __len__(self) -> int:
        return len(self.sample_ends)

    def pieces(self, sample: int) -> list[tuple[int, int]]:
        """[start, stop) in the stream of each piece of a sample."""
        first, last = int(self.sample_ends[sample - 1]) if sample else 0, int(self.sample_ends[sample])
        return list(zip(self.starts[first:last].tolist(), self.stops[first:last].tolist(), strict=True))


def write_packed(ends: Array, folder: Path, *, split: str, sequence_length: int, frame: int) -> dict[str, int]:
    """Pack the documents that end at `ends` ([documents], past their end-of-document ids); counts for the manifest.

    frame: tokens that each piece gets beside its own.
    """
    room = sequence_length - frame
    assert room > 0, "a sample has room for a token"
    ends = np.asarray(ends, np.int64)
    begins = np.concatenate([[0], ends[:-1]])[: len(ends)]
    lengths = ends - 1 - begins
    counts = -(-lengths // room)
    document = np.repeat(np.arange(len(ends)), counts)
    within = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = begins[document] + within * room
    stops = np.minimum(starts + room, ends[document] - 1)
    samples = packed((stops - starts + frame).tolist(), size=sequence_length)
    members = np.array([place for sample in samples for place in sample], np.int64)
    for name, numbers in (
        ("starts", starts[members]),
        ("stops", stops[members]),
        ("sample_ends", np.cumsum([len(sample) for sample in samples], dtype=np.int64)),
    ):
        np.asarray(numbers, "<i8").tofile(folder / f"{split}.{name}")
    held = int((stops - starts).sum()) + frame * len(starts)
    return {
        "documents": len(ends), "cut": int((counts > 1).sum()), "pieces": len(starts), "samples": len(samples),
        "padding": len(samples) * sequence_length - held,
    }  # fmt: skip
