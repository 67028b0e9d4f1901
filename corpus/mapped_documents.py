"""A token stream whose ids stay in another program's file: a table says where each document lies there.

Two plain files a split, beside nothing copied: NAME.starts holds one int64 a document, the place of its first id in
that file; NAME.ends is the same as of a token file (token_file.py): the offset in this stream just past its
end-of-document id. That id is put at the end of every document when it is read, so it is there once whether the file
holds it or not. Numbers are little-endian.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from corpus.token_file import Array, map_array


@dataclass(frozen=True)
class MappedDocuments:
    """tokens: the whole file; plus: is added to its ids; starts, ends: [documents]."""

    tokens: Array
    plus: int
    starts: Array
    ends: Array
    eod_id: int

    @classmethod
    def open(cls, folder: Path, *, split: str, tokens: Array, plus: int, eod_id: int) -> MappedDocuments:
        starts, ends = (map_array(folder / f"{split}.{name}", np.dtype("<i8")) for name in ("starts", "ends"))
        return cls(tokens, plus, starts, ends, eod_id)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, start: int, stop: int) -> Array:
        """Ids of the stream's places [start, stop), int64."""
        if start >= stop:
            return np.empty(0, np.int64)
        first, last = np.searchsorted(self.ends, [start, stop - 1], side="right")
        ends = np.asarray(self.ends[first : last + 1])
        begins = np.concatenate([[self.ends[first - 1] if first else 0], ends[:-1]])
        shifts = np.asarray(self.starts[first : last + 1]) - begins
        places = np.arange(start, stop) + np.repeat(shifts, np.minimum(ends, stop) - np.maximum(begins, start))
        closing = ends[ends <= stop] - 1 - start
        places[closing] = 0  # may lie past the file's end
        ids = self.tokens[places].astype(np.int64) + self.plus
        ids[closing] = self.eod_id
        return ids
