"""The documents of Megatron's indexed data, a few million ids at a time: lengths, digests, ends of documents, id range.

A document is what the index says it is, less the end-of-document id where it ends with one (--append-eod); documents
of no other id are empty. Nothing here works id by id: what is done for each document is one hash of its ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from corpus.megatron_index import MegatronIndex

BLOCK_TOKENS = 1 << 22  # read at once; a longer document is a block of its own
BLOCK_DOCUMENTS = 1 << 16


class IdOutOfRange(ValueError):
    """An id that the tokenizer does not have; the message names the place, `id` the number."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


@dataclass(frozen=True)
class Block:
    """Documents that follow each other. rows: all of them; per document that is not empty: starts: places in the .bin,
    lengths: without an end of document, sequences: numbers of their first ones, digests: of the ids as 32-bit numbers,
    whatever the file's type, lasts: the last stored ids, an end of document included.

    closed: documents with an end of document; eod_inside: such ids elsewhere; stop: where the block ends in the .bin.
    """

    rows: int
    starts: np.ndarray
    lengths: np.ndarray
    sequences: np.ndarray
    digests: np.ndarray
    lasts: np.ndarray
    closed: int
    eod_inside: int
    largest: int
    stop: int


def blocks(index: MegatronIndex, *, eod_id: int, num_ids: int, limit: int | None) -> Iterator[Block]:
    """All documents, up to `limit` that are not empty. ValueError for an id outside [0, num_ids)."""
    tokens = index.tokens()
    number = taken = 0
    while number < index.num_documents and taken != limit:
        remaining = index.num_documents if limit is None else limit - taken
        block = _block(index, tokens, number, eod_id=eod_id, num_ids=num_ids, remaining=remaining)
        number += block.rows
        taken += len(block.starts)
        yield block


def _block(
    index: MegatronIndex, tokens: np.ndarray, number: int, *, eod_id: int, num_ids: int, remaining: int
) -> Block:
    offsets = index.offsets(number, min(number + BLOCK_DOCUMENTS, index.num_documents))
    rows = max(1, int(np.searchsorted(offsets, offsets[0] + BLOCK_TOKENS, side="right")) - 1)
    lengths = np.diff(offsets[: rows + 1])
    lasts = np.full(rows, -1, np.int64)
    stored = lengths > 0
    lasts[stored] = tokens[offsets[1 : rows + 1][stored] - 1].astype(np.int64) + index.plus
    closed = lasts == eod_id
    lengths -= closed
    kept = np.flatnonzero(lengths > 0)
    if len(kept) >= remaining:
        kept = kept[:remaining]
        rows = int(kept[-1]) + 1
    start, stop = int(offsets[0]), int(offsets[rows])
    ids = tokens[start:stop]
    largest = _largest(index, ids, offsets[: rows + 1], number, num_ids)
    return Block(
        rows=rows,
        starts=offsets[kept],
        lengths=lengths[kept],
        sequences=index.sequences(number, number + rows - 1)[kept],
        digests=_digests(ids, index.plus, (offsets[kept] - start).tolist(), lengths[kept].tolist()),
        lasts=lasts[kept],
        closed=int(closed[kept].sum()),
        eod_inside=int((ids == eod_id - index.plus).sum()) - int(closed[:rows].sum()),
        largest=largest,
        stop=stop,
    )


def _largest(index: MegatronIndex, ids: np.ndarray, offsets: np.ndarray, number: int, num_ids: int) -> int:
    """The largest id, -1 where there is none."""
    if len(ids) == 0:
        return -1
    low, high = int(ids.min()) + index.plus, int(ids.max()) + index.plus
    if low >= 0 and high < num_ids:
        return high
    at = int(ids.argmax() if high >= num_ids else ids.argmin())
    document = number + int(np.searchsorted(offsets, offsets[0] + at, side="right")) - 1
    what = f"document {document} of {index.prefix}.bin holds the id {high if high >= num_ids else low}"
    if high >= num_ids:
        raise IdOutOfRange(what, high)
    raise ValueError(f"{what}: ids are not negative; the file is damaged, or holds something else than token ids")


def _digests(ids: np.ndarray, plus: int, starts: list[int], lengths: list[int]) -> np.ndarray:
    if len(ids) > BLOCK_TOKENS and len(starts) == 1:  # one long document: not all of it in memory as 32-bit numbers
        digest, stop = xxhash.xxh3_64(), starts[0] + lengths[0]
        for place in range(starts[0], stop, BLOCK_TOKENS):
            digest.update(_as_words(ids[place : min(place + BLOCK_TOKENS, stop)], plus).data)
        return np.array([digest.intdigest()], np.uint64)
    words = _as_words(ids, plus).data.cast("B")
    digest_of = xxhash.xxh3_64_intdigest
    found = (digest_of(words[4 * a : 4 * (a + n)]) for a, n in zip(starts, lengths, strict=True))
    return np.fromiter(found, np.uint64, len(starts))


def _as_words(ids: np.ndarray, plus: int) -> np.ndarray:
    return (ids.astype(np.int64) + plus if plus else ids).astype("<u4")
