"""From DataConfig to datasets: resolve the sources, load or train the tokenizer, tokenise once, open the token files.

Every process of a run may call `prepare` at the same time; torch.distributed is not involved. One builds per
filesystem, the others wait (cache.py). A second call with the same text, tokenizer and settings only opens files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conf.schema import DataConfig
from corpus.cache import Build, Progress, built_once
from corpus.dataset import Blend, SampleStream
from corpus.mapped_documents import MappedDocuments
from corpus.megatron_documents import index_documents
from corpus.readers import Tally, documents
from corpus.sources import ResolvedSource, resolve
from corpus.token_file import TokenFile, TokenStream, map_array
from corpus.tokenise import split_documents, tokenise
from corpus.tokenizer import Tokenizer, load_file, load_tokenizer, train_bpe
from corpus.vocabulary import require_vocabulary

FORMAT = 1  # of the files on disk; raise it when their meaning changes
BPE_BYTES = 64_000_000  # text that the BPE is trained on at most, over all sources


@dataclass(frozen=True)
class PreparedSource:
    """One corpus: its folder and manifest (counts, fingerprints, splits), and the targets that fill no whole sample."""

    label: str
    weight: float
    folder: Path
    manifest: dict[str, Any]
    train_samples: int
    dropped_tokens: int


@dataclass(frozen=True)
class PreparedCorpus:
    """train: for ever, shuffled each epoch; validation: fixed order, None where data.validation_fraction is 0.

    fingerprint: hex, of the token ids, the tokenizer and all that decides which sample is which; equal on all machines
    whose runs read the same samples. notes: lines that every start of a run should say.
    """

    train: Blend
    validation: Blend | None
    tokenizer: Tokenizer
    sources: tuple[PreparedSource, ...]
    fingerprint: str
    notes: tuple[str, ...] = ()


def prepare(
    data: DataConfig, *, vocab_size: int, seed: int, weights: bool = False, progress: Progress | None = None
) -> PreparedCorpus:
    """The corpus of `data`, tokenised if it is not yet. `progress` gets one line of text now and then; weights: whether
    some of so many ids are given.

    ValueError: bad settings, bad or too little text, a tokenizer with more ids than vocab_size.
    """
    tell: Progress = progress or (lambda line: None)
    resolved, tokenizer, opened = tokenised(data, vocab_size=vocab_size, weights=weights, progress=tell)
    train = _blend(opened, resolved, data=data, seed=seed, split="train")
    held_out = data.validation_fraction > 0
    validation = _blend(opened, resolved, data=data, seed=seed, split="validation") if held_out else None
    sources = tuple(
        PreparedSource(source.label, source.source.weight, folder, manifest, len(stream), stream.dropped_tokens)
        for source, (folder, manifest), stream in zip(resolved, opened, train.streams, strict=True)
    )
    identity = [FORMAT, tokenizer.fingerprint, data.sequence_length, data.mask_documents, seed]
    # Of Megatron data the tables depend on where documents lie in the file, its content does not.
    identity += [[source.weight, source.manifest.get("content", source.manifest["files"])] for source in sources]
    return PreparedCorpus(train, validation, tokenizer, sources, digest_of(identity))


def tokenised(
    data: DataConfig, *, vocab_size: int, weights: bool, progress: Progress
) -> tuple[list[ResolvedSource], Tokenizer, list[tuple[Path, dict[str, Any]]]]:
    """(sources, tokenizer, each source's folder of token files and its manifest); ValueError as `prepare`."""
    check(data)
    resolved = [resolve(source) for source in data.sources]
    tokenizer = _tokenizer(data, resolved, progress)
    require_vocabulary(tokenizer, vocab_size=vocab_size, weights=weights)
    opened = [
        _source(source, data=data, tokenizer=tokenizer, vocab_size=vocab_size, progress=progress) for source in resolved
    ]
    return resolved, tokenizer, opened


def check(data: DataConfig) -> None:
    """ValueError for settings that no corpus can be prepared with."""
    if not data.sources:
        raise ValueError("data.sources is empty; name at least one, such as {path: stdlib}")
    if not 0 <= data.validation_fraction < 1:
        raise ValueError(f"data.validation_fraction={data.validation_fraction} must be at least 0 and below 1")
    if data.num_workers < 0:
        raise ValueError(f"data.num_workers={data.num_workers} must not be negative; 0 takes one a core")


def _tokenizer(data: DataConfig, resolved: list[ResolvedSource], progress: Progress) -> Tokenizer:
    if data.tokenizer != "bpe":
        return load_tokenizer(data.tokenizer)
    for source in resolved:
        if source.kind == "megatron":
            raise ValueError(
                f"data.tokenizer=bpe is trained on text, and data.sources path={source.label} holds token ids; "
                "name the tokenizer that made them"
            )
    folder, key = _bpe_folder(data, resolved)

    def build(partial: Path, tell: Progress) -> dict[str, Any]:
        tell(f"training a BPE of {data.bpe_vocab_size} ids")
        texts = _training_texts(data, resolved)
        train_bpe(texts, size=data.bpe_vocab_size).save(str(partial / "tokenizer.json"))
        return {"format": FORMAT, "key": key, "sources": [source.label for source in resolved]}

    built_once(folder, build=build, what="the BPE tokenizer", timeout_s=data.wait_timeout_s, progress=progress)
    return load_file(folder / "tokenizer.json", name="bpe")


def _bpe_folder(data: DataConfig, resolved: list[ResolvedSource]) -> tuple[Path, str]:
    """Where the tokenizer trained on these texts is kept, and the key that it goes by."""
    key = digest_of(["bpe", data.bpe_vocab_size, BPE_BYTES, _text_key(data), [s.fingerprint() for s in resolved]])
    return Path(data.cache_dir) / f"bpe-{data.bpe_vocab_size}-{key[:16]}", key


def bpe_file(data: DataConfig) -> Path:
    """The tokenizer.json that data.tokenizer=bpe has trained. Raises ValueError where it is not there."""
    folder, _ = _bpe_folder(data, [resolve(source) for source in data.sources])
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"data.tokenizer=bpe: {folder} holds no tokenizer.json; the corpus is not prepared here")
    return folder / "tokenizer.json"


def _training_texts(data: DataConfig, resolved: list[ResolvedSource]) -> Iterator[str]:
    """Training documents up to BPE_BYTES, shared by weight; of a large source every k-th by content hash."""
    total = sum(source.source.weight for source in resolved)
    for source in resolved:
        budget = int(BPE_BYTES * source.source.weight / total)
        every = max(1, source.num_bytes // max(1, budget))
        used = 0
        found = documents(source, bad_lines=data.bad_lines, tally=Tally())
        for document, split in split_documents(found, fraction=data.validation_fraction):
            if split != "train" or (document.digest >> 7) % every:
                continue
            yield document.text[: budget - used]
            used += document.num_bytes
            if used >= budget:
                break


def _source(
    source: ResolvedSource, *, data: DataConfig, tokenizer: Tokenizer, vocab_size: int, progress: Progress
) -> tuple[Path, dict[str, Any]]:
    key = digest_of([FORMAT, source.fingerprint(), tokenizer.fingerprint, _text_key(data)])

    def build(partial: Path, tell: Progress) -> dict[str, Any]:
        if source.kind == "megatron":
            tell(f"{source.label}: looking through its documents")
            manifest = index_documents(
                source, data=data, tokenizer=tokenizer, vocab_size=vocab_size, folder=partial, progress=tell
            )
        else:
            tell(f"{source.label}: tokenising with {tokenizer.name}")
            manifest = tokenise(source, data=data, tokenizer=tokenizer, folder=partial, progress=tell)
        return {"format": FORMAT, "key": key, **manifest}

    return built_source(source.label, key, build, data=data, progress=progress)


def built_source(
    label: str, key: str, build: Build, *, data: DataConfig, progress: Progress
) -> tuple[Path, dict[str, Any]]:
    """(folder, manifest) of a source's files, built where there are none of this key yet."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.")[-40:] or "corpus"
    folder = Path(data.cache_dir) / f"{name}-{key[:16]}"
    return folder, built_once(folder, build=build, what=label, timeout_s=data.wait_timeout_s, progress=progress)


def _blend(
    opened: list[tuple[Path, dict[str, Any]]],
    resolved: list[ResolvedSource],
    *,
    data: DataConfig,
    seed: int,
    split: str,
) -> Blend:
    streams = [
        SampleStream(
            token_stream(source, folder, manifest, split=split),
            sequence_length=data.sequence_length,
            seed=seed,
            number=number,
            name=f"{split} part of data.sources[{number}]",
            shuffle=split == "train",
            mask_documents=data.mask_documents,
        )
        for number, (source, (folder, manifest)) in enumerate(zip(resolved, opened, strict=True))
    ]
    return Blend(streams, weights=[source.source.weight for source in resolved])


def token_stream(source: ResolvedSource, folder: Path, manifest: dict[str, Any], *, split: str) -> TokenStream:
    """The documents of one split of a prepared source."""
    if source.kind != "megatron":
        return TokenFile.open(folder, split=split, dtype=manifest["dtype"])
    ids = map_array(Path(source.files[1].path), np.dtype(manifest["dtype"]))
    return MappedDocuments.open(folder, split=split, tokens=ids, plus=manifest["plus"], eod_id=manifest["eod_id"])


def _text_key(data: DataConfig) -> list[Any]:
    """What of the settings decides the token files besides source and tokenizer."""
    return [data.validation_fraction, data.bad_lines.value]


def digest_of(what: Any) -> str:
    """sha256 of anything that JSON can say."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
