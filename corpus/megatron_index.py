"""The index (.idx) of Megatron's indexed data: where in the .bin each document begins, every header there has been.

    MMIDIDX, version 1   megatron.core.datasets.indexed_dataset, and Megatron-LM, Megatron-DeepSpeed, GPT-NeoX and NeMo
                         since 2019: dtype code, sequences, documents, lengths, byte offsets, documents' first sequences
    TNTIDX, version 1    Megatron-LM's and GPT-NeoX's `lazy` and `cached` data: the same facts in other places
    either, shorter      fairseq's own (also OPT's): no documents; its TNTIDX holds each id plus one

Which of them a file is, its header and its size say together: at most one layout has that size. All arrays stay
memory-mapped. An index that does not describe its .bin exactly is refused by name with what is wrong; nothing is read
around a fault. Not here: what the documents hold (megatron_documents.py), and writing (megatron_write.py).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MMAP_MAGIC = b"MMIDIDX\x00\x00"
LAZY_MAGIC = b"TNTIDX\x00\x00"
RETRIEVAL_MAGIC = b"MMIDRET\x00\x00"  # NeMo's, for retrieval-augmented models
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4", 10: "<u8"}  # 9 and 10: fairseq only
FLOATS = (6, 7)  # float32 and float64; which is which changed with the years
BLOCK = 1 << 20  # sequences that are checked at once


@dataclass(frozen=True)
class MegatronIndex:
    """starts: [sequences] offset of each in the .bin, in units of `unit` bytes; first_sequences: [documents + 1] number
    of each document's first sequence, None where every sequence is a document; plus: what is added to every id."""

    prefix: Path
    dtype: np.dtype
    num_tokens: int
    starts: np.ndarray
    unit: int
    first_sequences: np.ndarray | None
    plus: int = 0

    @property
    def num_sequences(self) -> int:
        return len(self.starts)

    @property
    def num_documents(self) -> int:
        return len(self.starts) if self.first_sequences is None else len(self.first_sequences) - 1

    def sequences(self, first: int, last: int) -> np.ndarray:
        """Number of the first sequence of documents first..last; that of the last one ends the one before."""
        if self.first_sequences is None:
            return np.arange(first, last + 1)
        return np.asarray(self.first_sequences[first : last + 1])

    def offsets(self, first: int, last: int) -> np.ndarray:
        """Place in the .bin, in tokens, of documents first..last; that of the last one ends the one before."""
        sequences = self.sequences(first, last)
        offsets = np.full(len(sequences), self.num_tokens, np.int64)
        inside = sequences < self.num_sequences
        offsets[inside] = self.starts[sequences[inside]] // (self.dtype.itemsize // self.unit)
        return offsets

    def tokens(self) -> np.ndarray:
        """The whole .bin, memory-mapped."""
        if self.num_tokens == 0:
            return np.empty(0, self.dtype)
        return np.asarray(np.memmap(self.prefix.with_name(self.prefix.name + ".bin"), self.dtype, "r"))


@dataclass(frozen=True)
class _Layout:
    """One way to lie in the .idx: (name, dtype, length) of the arrays that follow `header` bytes, in order."""

    header: int
    arrays: tuple[tuple[str, str, int], ...]

    @property
    def size(self) -> int:
        return self.header + sum(np.dtype(dtype).itemsize * length for _, dtype, length in self.arrays)

    def mapped(self, path: Path) -> dict[str, np.ndarray]:
        place, found = self.header, {}
        for name, dtype, length in self.arrays:
            array = np.memmap(path, dtype, "r", offset=place, shape=(length,)) if length else np.empty(0, dtype)
            found[name] = np.asarray(array)
            place += np.dtype(dtype).itemsize * length
        return found


def read_index(prefix: Path) -> MegatronIndex:
    """The index PREFIX.idx, checked against PREFIX.bin. ValueError with what is wrong."""
    path = prefix.with_name(prefix.name + ".idx")
    with open(path, "rb") as file:
        head = file.read(56)
    if head.startswith(MMAP_MAGIC):
        return _mmap_index(prefix, path, head)
    if head.startswith(LAZY_MAGIC):
        return _lazy_index(prefix, path, head)
    if head.startswith(RETRIEVAL_MAGIC):
        raise ValueError(f"{path}: an index of chunks for retrieval (MMIDRET), not of a corpus")
    raise ValueError(f"{path}: not an index of Megatron's (it begins with {head[:9]!r}, not with MMIDIDX or TNTIDX)")


def _unpack(path: Path, form: str, head: bytes, place: int) -> tuple[int, ...]:
    if len(head) < place + struct.calcsize(form):
        raise ValueError(f"{path}: {len(head)} bytes, cut off within its header; copy it again")
    return struct.unpack_from(form, head, place)


def _dtype(path: Path, code: int) -> np.dtype:
    if code in FLOATS:
        raise ValueError(f"{path}: holds floating-point numbers (dtype code {code}), not token ids")
    if code not in DTYPES:
        raise ValueError(f"{path}: dtype code {code} is none of {', '.join(map(str, DTYPES))}; the file is damaged")
    return np.dtype(DTYPES[code])


def _version(path: Path, version: int) -> None:
    if version != 1:
        raise ValueError(f"{path}: version {version} of the index is not known; only 1 is")


def _mmap_index(prefix: Path, path: Path, head: bytes) -> MegatronIndex:
    version, code, sequences = _unpack(path, "<QBQ", head, 9)
    _version(path, version)
    dtype = _dtype(path, code)
    body = (("lengths", "<i4", sequences), ("starts", "<i8", sequences))
    fairseq = _Layout(26, body)
    size = path.stat().st_size
    if size == fairseq.size:
        return _index(prefix, path, dtype, fairseq.mapped(path), unit=1)
    (documents,) = _unpack(path, "<Q", head, 26)
    text = _Layout(34, (*body, ("documents", "<i8", documents)))
    if sequences and size == text.size + sequences:
        raise ValueError(f"{path}: has a mode for each sequence, so it is multimodal data, which no model here reads")
    _same_size(path, size, text, f"{sequences} sequences and {documents} document marks")
    return _index(prefix, path, dtype, text.mapped(path), unit=1)


def _lazy_index(prefix: Path, path: Path, head: bytes) -> MegatronIndex:
    version, code, width, items, sizes = _unpack(path, "<QQQQQ", head, 8)
    _version(path, version)
    dtype = _dtype(path, code)
    if width != dtype.itemsize:
        raise ValueError(f"{path}: says {width} bytes an id, but dtype code {code} has {dtype.itemsize}; damaged")
    body = (("dims", "<i8", items + 1), ("starts", "<i8", items + 1), ("lengths", "<i8", sizes))
    fairseq = _Layout(48, body)
    size = path.stat().st_size
    plus = 0
    if size == fairseq.size:
        layout, plus = fairseq, -1  # Torch 7 counted from 1
    else:
        (documents,) = _unpack(path, "<Q", head, 48)
        layout = _Layout(56, (*body, ("documents", "<i8", documents)))
        _same_size(path, size, layout, f"{items} sequences and {documents} document marks")
    arrays = layout.mapped(path)
    if items != sizes or not np.array_equal(arrays.pop("dims"), np.arange(items + 1)):
        raise ValueError(f"{path}: its items have more than one dimension: not token ids")
    arrays["starts"] = arrays["starts"][:-1]
    return _index(prefix, path, dtype, arrays, unit=dtype.itemsize, plus=plus)


def _same_size(path: Path, size: int, layout: _Layout, what: str) -> None:
    if size != layout.size:
        fault = "cut off" if size < layout.size else "too long"
        raise ValueError(f"{path}: {fault}: {size} bytes where {what} take {layout.size}; copy or write it again")


def _index(
    prefix: Path, path: Path, dtype: np.dtype, arrays: dict[str, np.ndarray], *, unit: int, plus: int = 0
) -> MegatronIndex:
    lengths, starts, documents = arrays["lengths"], arrays["starts"], arrays.get("documents")
    num_tokens = _checked_sequences(path, lengths, starts, width=dtype.itemsize // unit)
    data = prefix.with_name(prefix.name + ".bin")
    size, wanted = data.stat().st_size, num_tokens * dtype.itemsize
    if size != wanted:
        fault = "cut off" if size < wanted else "too long"
        raise ValueError(
            f"{data}: {fault}: {size} bytes where {path.name} lists {num_tokens} ids of {dtype.itemsize} bytes "
            f"({wanted}); copy it again, or write both again"
        )
    if documents is not None:
        # Merged files of old versions carry only the first mark, a 0: there Megatron itself goes by sequences.
        documents = None if len(documents) == 1 and documents[0] == 0 else documents
    if documents is not None:
        _check_documents(path, documents, len(lengths))
    return MegatronIndex(prefix, dtype, num_tokens, starts, unit, documents, plus)


def _checked_sequences(path: Path, lengths: np.ndarray, starts: np.ndarray, *, width: int) -> int:
    """The number of tokens; ValueError where sequences do not follow each other."""
    place = 0
    for first in range(0, len(lengths), BLOCK):
        block = lengths[first : first + BLOCK].astype(np.int64)
        if block.min() < 0:
            raise ValueError(f"{path}: sequence {first + int(block.argmin())} is {block.min()} ids long; damaged")
        ends = place + np.cumsum(block)
        wanted = np.concatenate([[place], ends[:-1]]) * width
        wrong = np.flatnonzero(starts[first : first + BLOCK] != wanted)
        if len(wrong):
            at = int(wrong[0])
            raise ValueError(
                f"{path}: sequence {first + at} is said to begin at {starts[first + at]}, but those before it end at "
                f"{wanted[at]}; the index is damaged, or of a .bin whose sequences do not follow each other"
            )
        place = int(ends[-1])
    return place


def _check_documents(path: Path, documents: np.ndarray, sequences: int) -> None:
    if len(documents) == 0 or documents[0] != 0 or documents[-1] != sequences:
        first, last = (documents[0], documents[-1]) if len(documents) else ("none", "none")
        raise ValueError(
            f"{path}: its documents go from sequence {first} to {last}, not from 0 to {sequences}; "
            "the index is damaged, or was merged by a version that lost them"
        )
    for first in range(0, len(documents), BLOCK):
        steps = np.diff(documents[first : first + BLOCK + 1])
        if len(steps) and steps.min() < 0:
            raise ValueError(f"{path}: document {first + int(steps.argmin())} ends before it begins; damaged")
