"""Small corpora and plans for the tests of corpus/."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conf.schema import CorpusSource, DataConfig
from corpus.dataset import Blend, SampleStream
from corpus.prepare import PreparedCorpus, prepare
from corpus.token_file import TokenFile

EOD = 256  # of the byte tokenizer


@dataclass(frozen=True)
class Plan:
    """The part of a ParallelPlan that batches read."""

    micro_batch_size: int
    data_parallel_size: int
    num_micro_batches: int
    ramp: tuple[tuple[int, int], ...] = ()  # (samples seen below this, micro-batches)

    def num_micro_batches_at(self, samples_seen: int) -> int:
        for limit, number in self.ramp:
            if samples_seen < limit:
                return number
        return self.num_micro_batches


def write_jsonl(path: Path, texts: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def config(cache: Path, *paths: Path | str, **fields: Any) -> DataConfig:
    sources = [CorpusSource(path=str(path)) for path in paths]
    settings: dict[str, Any] = {"sequence_length": 8, "validation_fraction": 0.0, "num_workers": 2}
    return DataConfig(sources=sources, cache_dir=str(cache / "cache"), **(settings | fields))


def prepared(cache: Path, *paths: Path | str, vocab_size: int = 257, **fields: Any) -> PreparedCorpus:
    return prepare(config(cache, *paths, **fields), vocab_size=vocab_size, seed=7)


def stream_text(tokens: Sequence[int]) -> list[bytes]:
    """The documents of a byte-token stream, each without its end-of-document token."""
    ids = np.asarray(tokens)
    *documents, rest = np.split(ids, np.flatnonzero(ids == EOD) + 1)
    assert len(rest) == 0, "the stream does not end with an end of document"
    return [document[:-1].astype(np.uint8).tobytes() for document in documents]


def train_documents(corpus: PreparedCorpus, source: int = 0) -> list[bytes]:
    return documents_of(corpus.train, source)


def documents_of(blend: Blend, source: int = 0) -> list[bytes]:
    tokens = blend.streams[source].tokens
    return stream_text(tokens.read(0, len(tokens)))


def token_file(documents: Sequence[Sequence[int]], eod: int = EOD) -> TokenFile:
    """Documents in memory, each followed by eod."""
    tokens = [token for document in documents for token in [*document, eod]]
    ends = np.cumsum([len(document) + 1 for document in documents])
    return TokenFile(np.array(tokens, np.uint16), np.array(ends, np.int64))


def stream(tokens: TokenFile, *, sequence_length: int, **fields: Any) -> SampleStream:
    settings: dict[str, Any] = {"seed": 3, "shuffle": True, "mask_documents": True}
    return SampleStream(tokens, sequence_length=sequence_length, **(settings | fields))


def constant_samples(number: int, *, sequence_length: int = 4, **fields: Any) -> SampleStream:
    """Exactly `number` samples; every input of sample i is the token i."""
    tokens = np.repeat(np.arange(number), sequence_length)
    tokens = np.append(tokens, number)
    return stream(
        TokenFile(tokens.astype(np.uint16), np.array([len(tokens)], np.int64)),
        sequence_length=sequence_length,
        **fields,
    )
