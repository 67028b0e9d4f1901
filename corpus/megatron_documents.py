"""Megatron's indexed data made a source: which of its documents are for training and which for validation.

The ids are not copied. One pass over the .bin writes, for each split, where its documents lie (mapped_documents.py),
and counts what every corpus counts. Each document is closed by one end-of-document id when it is read, whether the file
holds that id or not; `eod_id` of the source names it where it is not the tokenizer's.

Splits are by a hash of each document's ids, as for text, or, with `split` of the source, by Megatron's own --split.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from conf.schema import DataConfig
from corpus.cache import Progress
from corpus.megatron_blocks import Block, IdOutOfRange, blocks
from corpus.megatron_index import MegatronIndex, read_index
from corpus.readers import Tally
from corpus.sources import ResolvedSource
from corpus.tokenise import SPLITS, require_splits
from corpus.tokenizer import Tokenizer

Rule = Callable[[Block], np.ndarray]  # number of each document's split; len(SPLITS): neither


@dataclass
class _Table:
    """The two files of one split, and a digest of all its documents."""

    folder: Path
    split: str
    num_documents: int = 0
    num_tokens: int = 0
    content: Any = field(default_factory=hashlib.sha256)

    def __post_init__(self) -> None:
        names = ("starts", "ends")
        self._files = [open(self.folder / f"{self.split}.{name}", "wb") for name in names]  # noqa: SIM115

    def add(self, block: Block, mine: np.ndarray) -> None:
        ends = self.num_tokens + np.cumsum(block.lengths[mine] + 1)
        for file, array in zip(self._files, (block.starts[mine], ends), strict=True):
            file.write(array.astype("<i8").tobytes())
        self.content.update(block.digests[mine].tobytes())
        self.num_documents += len(ends)
        self.num_tokens = int(ends[-1]) if len(ends) else self.num_tokens

    def close(self) -> None:
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
            file.close()


@dataclass
class _Totals:
    """What is counted over all blocks."""

    tally: Tally = field(default_factory=Tally)
    closed: int = 0
    eod_inside: int = 0
    left_out: int = 0
    largest: int = -1
    lowest: float = 2.0**64
    endings: set[int] = field(default_factory=set)  # two different last ids, or the only one

    def add(self, block: Block, left_out: int) -> None:
        self.tally.rows += block.rows
        self.tally.documents += len(block.starts)
        self.tally.empty += block.rows - len(block.starts)
        for digest in block.digests.tolist():
            self.tally.duplicates.add(digest)
        self.closed += block.closed
        self.eod_inside += block.eod_inside
        self.left_out += left_out
        self.largest = max(self.largest, block.largest)
        if len(block.digests):
            self.lowest = min(self.lowest, float(block.digests.min()))
        if len(self.endings) < 2:
            self.endings.update(np.unique(block.lasts)[:2].tolist())

    def as_counts(self) -> dict[str, Any]:
        own = {"closed": self.closed, "eod_inside": self.eod_inside, "left_out": self.left_out}
        return self.tally.as_counts() | own


def index_documents(
    source: ResolvedSource, *, data: DataConfig, tokenizer: Tokenizer, vocab_size: int, folder: Path, progress: Progress
) -> dict[str, Any]:
    """Writes the tables of both splits into `folder` and returns the manifest. ValueError for a damaged index, ids that
    the tokenizer does not have, an end of document that is not clear, an empty corpus or an empty split."""
    started = told = time.monotonic()
    eod_id = _end_of_document(source, tokenizer)
    index = read_index(Path(source.files[0].path.removesuffix(".idx")))
    rule = _split_rule(source, index, data.validation_fraction)
    totals, tables = _Totals(), [_Table(folder, split) for split in SPLITS]
    try:
        for block in blocks(index, eod_id=eod_id, num_ids=tokenizer.size, limit=source.source.max_documents):
            chosen = rule(block)
            for number, table in enumerate(tables):
                table.add(block, chosen == number)
            totals.add(block, left_out=int((chosen == len(SPLITS)).sum()))
            if time.monotonic() - told > 1:
                told = time.monotonic()
                progress(_progress_line(source, totals, block.stop / max(1, index.num_tokens), told - started))
    except IdOutOfRange as error:
        raise ValueError(
            f"{error}, but data.tokenizer={tokenizer.name} has {tokenizer.size} ids (model.vocab_size={vocab_size}); "
            f"name the tokenizer that made it, and set model.vocab_size to at least {error.number + 1}"
        ) from None
    finally:
        for table in tables:
            table.close()
    _require_documents(source, totals, tables, data.validation_fraction)
    _require_clear_end(source, totals, tokenizer)
    return {
        "source": {"path": source.label, "fingerprint": source.fingerprint()},
        "source_files": [[file.path, file.size, file.mtime_ns] for file in source.files],
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint, "size": tokenizer.size},
        "eod_id": eod_id,
        "dtype": index.dtype.str,
        "plus": index.plus,
        "largest_id": totals.largest,
        "counts": totals.as_counts(),
        "splits": {
            table.split: {"documents": table.num_documents, "tokens": table.num_tokens, "text_bytes": None}
            for table in tables
        },
        "content": [eod_id, *(table.content.hexdigest() for table in tables)],
        "seconds": round(time.monotonic() - started, 3),
    }


def _end_of_document(source: ResolvedSource, tokenizer: Tokenizer) -> int:
    eod_id = source.source.eod_id
    if eod_id is None:
        return tokenizer.eod_id
    if eod_id >= tokenizer.size:
        raise ValueError(
            f"data.sources path={source.label} eod_id={eod_id} is none of the {tokenizer.size} ids of "
            f"data.tokenizer={tokenizer.name}"
        )
    return eod_id


def _split_rule(source: ResolvedSource, index: MegatronIndex, fraction: float) -> Rule:
    split = source.source.split
    if split == "train":  # the knob's default
        return lambda block: (block.digests < fraction * 2.0**64).astype(np.int64)
    if not re.fullmatch(r"\d*\.?\d+(,\d*\.?\d+){0,2}", split) or not any(map(float, split.split(","))):
        raise ValueError(
            f"data.sources path={source.label} split={split}: of Megatron data write its --split, as 99,1,0"
        )
    if index.first_sequences is not None:
        steps = np.diff(index.first_sequences)
        if steps.max(initial=0) > 1:
            raise ValueError(
                f"data.sources path={source.label} split={split} counts sequences, and document "
                f"{int(steps.argmax())} has {steps.max()}; leave it out and set data.validation_fraction"
            )
    shares = [float(part) for part in split.split(",")]
    # As megatron.core.datasets rounds: blended_megatron_dataset_builder.py, _build_megatron_dataset_splits.
    ends = [round(end * index.num_sequences) for end in accumulate(share / np.sum(shares) for share in shares)]
    marks = (ends + [ends[-1]])[: len(SPLITS)]
    return lambda block: np.searchsorted(marks, block.sequences, side="right")


def _progress_line(source: ResolvedSource, totals: _Totals, share: float, seconds: float) -> str:
    left = seconds / share - seconds if share else 0.0
    return f"{source.label}: {totals.tally.documents} documents, {share:.0%} of the file, about {left:.0f} s left"


def _require_documents(source: ResolvedSource, totals: _Totals, tables: list[_Table], fraction: float) -> None:
    tally = totals.tally
    if tally.documents == 0:
        raise ValueError(f"data.sources path={source.label}: no token in its {tally.rows} documents")
    train, validation = (table.num_documents for table in tables)
    if source.source.split != "train":
        for name, number, wanted in (("train on", train, True), ("validate on", validation, fraction > 0)):
            if wanted and number == 0:
                what = f"data.sources path={source.label} split={source.source.split}"
                raise ValueError(f"{what} leaves none of the {tally.documents} documents to {name}; change it")
    elif tally.documents == 1 and fraction > 0:
        raise ValueError(f"data.sources path={source.label} is one document; set data.validation_fraction=0")
    else:
        require_splits(source.label, tally.documents, train, validation, fraction, totals.lowest)


def _require_clear_end(source: ResolvedSource, totals: _Totals, tokenizer: Tokenizer) -> None:
    """Where all documents end with one id that is not known to be the end of document, it may be just that."""
    documents = totals.tally.documents
    if source.source.eod_id is None and documents > 1 and totals.closed == 0 and len(totals.endings) == 1:
        (last,) = totals.endings
        raise ValueError(
            f"data.sources path={source.label}: all {documents} documents end with the id {last}, and "
            f"data.tokenizer={tokenizer.name} ends documents with {tokenizer.eod_id}; set eod_id of this entry: "
            f"{last} if that closes them, {tokenizer.eod_id} if they are to be closed by this one as well"
        )
