"""A stream of token ids on disk, memory-mapped, with the places where its documents end.

Two plain files a split: NAME.bin holds the ids (uint16 where they fit, else uint32), NAME.ends one int64 a document:
the offset just past its end-of-document token. Numbers are little-endian. Integrity is cache.py's business.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

Array = np.ndarray


def token_dtype(size: int) -> np.dtype:
    """The narrowest id type for a tokenizer of `size` ids."""
    return np.dtype("<u2") if size <= 1 << 16 else np.dtype("<u4")


def map_array(path: Path, dtype: np.dtype) -> Array:
    if path.stat().st_size == 0:
        return np.empty(0, dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r")


class TokenStream(Protocol):
    """Documents one after another, each closed by the end-of-document id; ends: [documents] offsets, increasing."""

    @property
    def ends(self) -> Array: ...

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> Array:
        """Ids of the stream's places [start, stop), int64."""
        ...


def document_starts(stream: TokenStream, start: int, stop: int) -> Array:
    """Places in [start, stop) at which a document begins, place 0 of the stream left out."""
    first, last = np.searchsorted(stream.ends, [start, stop], side="left")
    return np.asarray(stream.ends[first:last]).astype(np.int64)


@dataclass(frozen=True)
class TokenFile:
    """tokens: [N] ids; ends: [documents] offsets, increasing, the last one N."""

    tokens: Array
    ends: Array

    @classmethod
    def open(cls, folder: Path, *, split: str, dtype: str) -> TokenFile:
        ids, ends = folder / f"{split}.bin", folder / f"{split}.ends"
        return cls(map_array(ids, np.dtype(dtype)), map_array(ends, np.dtype("<i8")))

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> Array:
        return np.asarray(self.tokens[start:stop]).astype(np.int64)


@dataclass
class TokenWriter:
    """Writes one split; `end_document` closes a document with the end-of-document id."""

    folder: Path
    split: str
    dtype: np.dtype
    eod_id: int
    num_tokens: int = 0
    num_documents: int = 0
    _open_tokens: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._bin = open(self.folder / f"{self.split}.bin", "wb")  # noqa: SIM115 (closed by `close`)
        self._ends = open(self.folder / f"{self.split}.ends", "wb")  # noqa: SIM115
        self._eod = np.array([self.eod_id], self.dtype).tobytes()

    def write(self, ids: Array) -> None:
        """Appends ids to the open document."""
        self._bin.write(ids.astype(self.dtype, copy=False).tobytes())
        self._open_tokens += len(ids)

    def end_document(self) -> bool:
        """Closes the document; one without a token is left out (False)."""
        if self._open_tokens == 0:
            return False
        self._bin.write(self._eod)
        self.num_tokens += self._open_tokens + 1
        self.num_documents += 1
        self._open_tokens = 0
        self._ends.write(np.array([self.num_tokens], "<i8").tobytes())
        return True

    def close(self) -> None:
        for file in (self._bin, self._ends):
            file.flush()
            os.fsync(file.fileno())
            file.close()
