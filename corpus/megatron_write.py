"""A prepared corpus written as Megatron's indexed data, PREFIX.bin and PREFIX.idx, as megatron-core writes it.

One sequence a document, each closed by its end-of-document id, as tools/preprocess_data.py --append-eod makes them:
the ids are those of our stream, one after another. The format is that of `megatron.core.datasets.indexed_dataset`,
unchanged since 2019, so Megatron-LM, Megatron-DeepSpeed, GPT-NeoX and NeMo read it. A pair of files appears whole or
not at all, the .idx last.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from corpus.dataset import SampleStream
from corpus.masked_stream import MaskedStream
from corpus.megatron_index import MMAP_MAGIC
from corpus.prepare import PreparedCorpus
from corpus.token_file import TokenStream

TOKENS = 1 << 22  # written at once
DOCUMENTS = 1 << 20
MOST_IN_SEQUENCE = 2**31 - 1  # lengths are 32-bit


@dataclass(frozen=True)
class Written:
    """One pair of files."""

    prefix: Path
    documents: int
    tokens: int
    dtype: str

    def line(self) -> str:
        return f"{self.prefix}.bin and .idx: {self.documents:,} documents, {self.tokens:,} tokens of {self.dtype}"


def targets(prefix: str, *, num_sources: int, validation: bool, overwrite: bool) -> dict[tuple[str, int], Path]:
    """What .bin and .idx are appended to, by split and number of the source: PREFIX_train and PREFIX_validation, with
    several sources PREFIX_0_train and so on. ValueError where a file is there already."""
    found = {}
    for split in ("train", "validation") if validation else ("train",):
        for number in range(num_sources):
            middle = f"_{number}" if num_sources > 1 else ""
            found[split, number] = base = Path(f"{prefix}{middle}_{split}").expanduser()
            for path in _paths(base):
                if path.exists() and not overwrite:
                    raise ValueError(f"prepare.megatron={prefix}: {path} is there already; set prepare.overwrite=true")
    return found


def write_corpus(corpus: PreparedCorpus, places: dict[tuple[str, int], Path]) -> Iterator[Written]:
    """Writes every split of every source to its place. ValueError where a document is too long for the format."""
    dtype = np.dtype("<u2") if corpus.tokenizer.size < 65500 else np.dtype("<i4")  # as DType.optimal_dtype chooses
    for (split, number), base in places.items():
        blend = corpus.train if split == "train" else corpus.validation
        assert blend is not None
        stream = blend.streams[number]
        assert isinstance(stream, (SampleStream, MaskedStream)), "conversations are refused before"
        tokens = stream.tokens
        _write(tokens, base, dtype)
        yield Written(base, len(tokens.ends), len(tokens), dtype.name)


def _paths(base: Path) -> tuple[Path, Path]:
    """(.bin, .idx)"""
    return base.with_name(base.name + ".bin"), base.with_name(base.name + ".idx")


def _write(tokens: TokenStream, base: Path, dtype: np.dtype) -> None:
    base.parent.mkdir(parents=True, exist_ok=True)
    finals = _paths(base)
    partials = [path.with_name(f"{path.name}.partial-{os.getpid()}") for path in finals]
    try:
        with ExitStack() as stack:
            data, index = (stack.enter_context(open(path, "wb")) for path in partials)
            for start in range(0, len(tokens), TOKENS):
                data.write(tokens.read(start, min(start + TOKENS, len(tokens))).astype(dtype).tobytes())
            _write_index(index, tokens, dtype, base)
            for file in (data, index):
                file.flush()
                os.fsync(file.fileno())
        finals[1].unlink(missing_ok=True)  # never an old index beside new data
        for partial, final in zip(partials, finals, strict=True):
            partial.rename(final)
    finally:
        for partial in partials:
            partial.unlink(missing_ok=True)


def _write_index(file: IO[bytes], tokens: TokenStream, dtype: np.dtype, base: Path) -> None:
    documents = len(tokens.ends)
    code = {2: 8, 4: 4}[dtype.itemsize]
    file.write(MMAP_MAGIC + struct.pack("<QBQQ", 1, code, documents, documents + 1))
    for begins, ends in _extents(tokens):
        lengths = ends - begins
        if lengths.max() > MOST_IN_SEQUENCE:
            raise ValueError(f"{base}: a document of {lengths.max()} tokens does not fit Megatron's 32-bit lengths")
        file.write(lengths.astype("<i4").tobytes())
    for begins, _ in _extents(tokens):
        file.write((begins * dtype.itemsize).astype("<i8").tobytes())
    for first in range(0, documents + 1, DOCUMENTS):
        file.write(np.arange(first, min(first + DOCUMENTS, documents + 1), dtype="<i8").tobytes())


def _extents(tokens: TokenStream) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(where they begin, where they end) of the documents, some at a time."""
    before = 0
    for first in range(0, len(tokens.ends), DOCUMENTS):
        ends = np.asarray(tokens.ends[first : first + DOCUMENTS])
        yield np.concatenate([[before], ends[:-1]]), ends
        before = int(ends[-1])
