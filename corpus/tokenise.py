"""Documents to token files: split into train and validation, encoded by threads, written in document order.

Threads, not processes: the `tokenizers` library leaves the interpreter lock while it encodes, and a rank that already
holds process groups must not fork. Memory is bounded: at most two chunks a thread wait to be written.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from conf.schema import DataConfig
from corpus.cache import Progress
from corpus.readers import Document, Tally, documents
from corpus.sources import ResolvedSource
from corpus.token_file import TokenWriter, token_dtype
from corpus.tokenizer import Tokenizer

SPLITS = ("train", "validation")
CHUNK_BYTES = 1 << 20  # text encoded per task
PIECE_CHARACTERS = 1 << 22  # longer documents are encoded in pieces of about this length


class Piece(NamedTuple):
    """Part of a document; last: the document ends here."""

    text: str
    split: str
    last: bool


def split_documents(found: Iterable[Document], *, fraction: float) -> Iterator[tuple[Document, str]]:
    """Each document with its split: validation where its content's hash falls below `fraction`, so equal documents are
    never on both sides. A source of one single document is cut instead, at a line end: its tail is for validation."""
    several = iter(found)
    head = list(itertools.islice(several, 2))
    if len(head) == 1 and fraction > 0:
        text = head[0].text
        cut = text.rfind("\n", 0, int(len(text) * (1 - fraction))) + 1 or int(len(text) * (1 - fraction))
        for part, split in ((text[:cut], "train"), (text[cut:], "validation")):
            if part:
                yield head[0]._replace(text=part, num_bytes=len(part.encode())), split
        return
    for document in itertools.chain(head, several):
        yield document, "validation" if document.digest < fraction * 2.0**64 else "train"


def pieces(text: str, *, split: str, size: int = PIECE_CHARACTERS) -> Iterator[Piece]:
    """Cuts a long document where the ids stay those of the whole: pre-tokenizers of the GPT kind join nothing across
    the places that `_boundary` takes. A stretch of `size` characters without one is cut at its end all the same."""
    start = 0
    while len(text) - start > size:
        cut = _boundary(text, start, start + size)
        yield Piece(text[start:cut], split, False)
        start = cut
    yield Piece(text[start:], split, True)


def _boundary(text: str, start: int, stop: int) -> int:
    """The last place in (start, stop) after a newline, else before a space, with no other space beside; else stop."""
    for mark, after in (("\n", 1), (" ", 0)):
        place = text.rfind(mark, start + 1, stop)
        while place > start and (text[place - 1].isspace() or text[place + 1].isspace()):
            place = text.rfind(mark, start + 1, place)
        if place > start:
            return place + after
    return stop


def tokenise(
    source: ResolvedSource, *, data: DataConfig, tokenizer: Tokenizer, folder: Path, progress: Progress
) -> dict[str, Any]:
    """Writes both splits of `source` into `folder` and returns the manifest. ValueError for bad rows, an empty corpus
    or an empty split."""
    tally = Tally()
    dtype = token_dtype(tokenizer.size)
    writers = {split: TokenWriter(folder, split, dtype, tokenizer.eod_id) for split in SPLITS}
    text_bytes = dict.fromkeys(SPLITS, 0)
    lowest = 2.0**64
    started = told = time.monotonic()

    def cut() -> Iterator[Piece]:
        nonlocal lowest
        found = documents(source, bad_lines=data.bad_lines, tally=tally)
        for document, split in split_documents(found, fraction=data.validation_fraction):
            text_bytes[split] += document.num_bytes
            lowest = min(lowest, document.digest)
            yield from pieces(document.text, split=split)

    try:
        for chunk, ids in _encoded(_chunks(cut()), tokenizer, num_workers=data.num_workers or _num_cores()):
            for piece, piece_ids in zip(chunk, ids, strict=True):
                writer = writers[piece.split]
                writer.write(piece_ids)
                if piece.last and not writer.end_document():
                    tally.documents -= 1
                    tally.empty += 1
            if time.monotonic() - told > 1:
                told = time.monotonic()
                progress(_progress_line(source, tally, sum(text_bytes.values()), told - started))
    finally:
        for writer in writers.values():
            writer.close()
    _require_text(source, tally, writers, data.validation_fraction, lowest)
    return {
        "source": {"path": source.label, "fingerprint": source.fingerprint()},
        "source_files": [[file.path, file.size, file.mtime_ns] for file in source.files],
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint, "size": tokenizer.size},
        "eod_id": tokenizer.eod_id,
        "dtype": dtype.str,
        "counts": tally.as_counts(),
        "splits": {
            split: {"documents": writer.num_documents, "tokens": writer.num_tokens, "text_bytes": text_bytes[split]}
            for split, writer in writers.items()
        },
        "seconds": round(time.monotonic() - started, 3),
    }


def _chunks(parts: Iterable[Piece]) -> Iterator[list[Piece]]:
    chunk: list[Piece] = []
    size = 0
    for piece in parts:
        chunk.append(piece)
        size += len(piece.text)
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _encoded(
    chunks: Iterable[list[Piece]], tokenizer: Tokenizer, *, num_workers: int
) -> Iterator[tuple[list[Piece], list[np.ndarray]]]:
    """Chunks with their ids, in order."""

    def encode(chunk: list[Piece]) -> list[np.ndarray]:
        ids = tokenizer.encode([piece.text for piece in chunk])
        assert all(len(i) == 0 or i.max() < tokenizer.size for i in ids), "an id beyond the tokenizer's size"
        return ids

    waiting: deque[tuple[list[Piece], Future[list[np.ndarray]]]] = deque()
    with ThreadPoolExecutor(num_workers, thread_name_prefix="tokenise") as pool:
        for chunk in chunks:
            waiting.append((chunk, pool.submit(encode, chunk)))
            if len(waiting) >= 2 * num_workers:
                done, future = waiting.popleft()
                yield done, future.result()
        for done, future in waiting:
            yield done, future.result()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _progress_line(source: ResolvedSource, tally: Tally, done: int, seconds: float) -> str:
    line = f"{source.label}: {tally.documents} documents, {done / 1e6:.1f} MB, {done / 1e6 / seconds:.1f} MB/s"
    if 0 < tally.file_bytes < source.num_bytes:
        left = seconds * (source.num_bytes - tally.file_bytes) / tally.file_bytes
        line += f", {tally.file_bytes / source.num_bytes:.0%} of the files, about {left:.0f} s left"
    return line


def _require_text(
    source: ResolvedSource, tally: Tally, writers: dict[str, TokenWriter], fraction: float, lowest: float
) -> None:
    if tally.documents == 0:
        bad = f"; the first broken row: {tally.first_bad}" if tally.first_bad else ""
        raise ValueError(
            f"data.sources path={source.label}: no text in {tally.rows} rows of {max(1, len(source.files))} files "
            f"({tally.empty} empty, {tally.absent} without text, {tally.bad} broken){bad}"
        )
    train, validation = (writers[split].num_documents for split in SPLITS)
    require_splits(source.label, tally.documents, train, validation, fraction, lowest)


def require_splits(label: str, documents: int, train: int, validation: int, fraction: float, lowest: float) -> None:
    """ValueError where a split that is asked for got no document; lowest: the least of all digests."""
    if train == 0:
        raise ValueError(f"data.validation_fraction={fraction} leaves no document of {label} to train on; lower it")
    if fraction > 0 and validation == 0:
        enough = min(0.5, round(lowest / 2.0**64 * 1.01 + 1e-4, 4))
        raise ValueError(
            f"data.validation_fraction={fraction} holds out none of the {documents} documents of {label}; "
            f"set {enough} for at least one, or 0 for no validation"
        )
