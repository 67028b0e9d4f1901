"""From DataConfig to datasets of conversations: rendered, encoded, cut to the sequence, packed, once; then mapped.

The counterpart of prepare.py for data.format=conversations, with its caches and its promises: any process may call it
at any time, one builds. The manifest says what became of every row and every token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.schema import CorpusSource, DataConfig
from corpus.cache import Progress
from corpus.chat_tokenizer import ChatTokenizer, load_chat_tokenizer
from corpus.conversation_file import ConversationFile, ConversationStream, ConversationWriter
from corpus.conversation_summary import notes
from corpus.conversations import Conversation, ConversationTally, conversation_columns, conversations
from corpus.dataset import Blend
from corpus.prepare import PreparedCorpus, PreparedSource, built_source, check, digest_of
from corpus.sources import ResolvedSource, resolve
from corpus.token_file import token_dtype
from corpus.tokenizer import load_tokenizer
from corpus.vocabulary import require_vocabulary

FORMAT = 1  # of the files on disk; raise it when their meaning changes
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class _Opened:
    """A source whose `share` is for validation (some by hash, none or all), and where its conversations are."""

    source: ResolvedSource
    share: float
    folder: Path
    manifest: dict[str, Any]


def prepare_conversations(
    data: DataConfig, *, vocab_size: int, seed: int, weights: bool = False, progress: Progress | None = None
) -> PreparedCorpus:
    """The conversations of `data`. ValueError: bad settings, bad rows, a tokenizer or template that does not serve."""
    check(data)
    tell: Progress = progress or (lambda line: None)
    chat, tokenizer = load_chat_tokenizer(data), load_tokenizer(data.tokenizer)
    require_vocabulary(tokenizer, vocab_size=vocab_size, weights=weights)
    by_hash = 0.0 if data.validation_sources else data.validation_fraction
    resolved = [(_resolved(source), by_hash) for source in data.sources]
    resolved += [(_resolved(source), 1.0) for source in data.validation_sources]
    opened = [_opened(*one, data=data, tokenizer=chat, progress=tell) for one in resolved]
    options: dict[str, Any] = dict(sequence_length=data.sequence_length, seed=seed, padding_id=tokenizer.eod_id)
    train = _blend([one for one in opened if one.share < 1], split="train", **options)
    held_out = [one for one in opened if one.share > 0 and (one.share == 1 or not data.validation_sources)]
    sources = tuple(
        PreparedSource(one.source.label, one.source.source.weight, one.folder, one.manifest, _samples(one), 0)
        for one in opened
    )
    identity: list[Any] = [FORMAT, "conversations", chat.fingerprint, data.sequence_length, data.mask_documents, seed]
    identity += [[source.weight, source.manifest["files"]] for source in sources]
    validation = _blend(held_out, split="validation", **options) if held_out else None
    return PreparedCorpus(train, validation, tokenizer, sources, digest_of(identity), notes(sources))


def _resolved(source: CorpusSource) -> ResolvedSource:
    resolved = resolve(source)
    kinds = {file.kind for file in resolved.files} & {"txt"} or {resolved.kind} & {"megatron"}
    if kinds:
        raise ValueError(
            f"data.sources path={source.path} is {'text' if 'txt' in kinds else 'token ids'}, not conversations; name "
            ".jsonl, .csv or .parquet files with messages, or with prompt and completion, or hf:NAME"
        )
    return resolved


def _samples(one: _Opened) -> int:
    return one.manifest["splits"]["train"]["samples"]


def _blend(opened: list[_Opened], *, split: str, **options: Any) -> Blend:
    streams = [
        ConversationStream(
            ConversationFile.open(one.folder, split=split, dtype=one.manifest["dtype"]),
            shuffle=split == "train", number=number, **options,
        )
        for number, one in enumerate(opened)
    ]  # fmt: skip
    return Blend(streams, weights=[one.source.source.weight for one in opened])


def _opened(
    source: ResolvedSource, share: float, *, data: DataConfig, tokenizer: ChatTokenizer, progress: Progress
) -> _Opened:
    what = [conversation_columns(source).alternatives, data.bad_lines.value, data.sequence_length, data.packing]
    key = digest_of([FORMAT, "conversations", source.fingerprint(), tokenizer.fingerprint, share, what])

    def build(partial: Path, tell: Progress) -> dict[str, Any]:
        tell(f"{source.label}: conversations through {tokenizer.name}")
        manifest = _encode(source, share, data=data, tokenizer=tokenizer, folder=partial, progress=tell)
        return {"format": FORMAT, "key": key, **manifest}

    return _Opened(source, share, *built_source(source.label, key, build, data=data, progress=progress))


def _encode(
    source: ResolvedSource, share: float, *, data: DataConfig, tokenizer: ChatTokenizer, folder: Path,
    progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    """Writes both splits into `folder` and returns the manifest."""
    tally, started = ConversationTally(), time.monotonic()
    size = max(tokenizer.tokenizer.get_vocab().values()) + 1
    dtype = token_dtype(size)
    writers = {split: ConversationWriter(folder, split, dtype) for split in SPLITS}
    lowest, told = 2.0**64, started
    found = conversations(source, tokenizer, bad_lines=data.bad_lines, tally=tally)
    for one in _kept(found, length=data.sequence_length, tally=tally):
        lowest = min(lowest, one.digest)
        writers["validation" if one.digest < share * 2.0**64 else "train"].write(one)
        if time.monotonic() - told > 1:
            told = time.monotonic()
            progress(f"{source.label}: {tally.conversations} conversations, {tally.file_bytes / 1e6:.1f} MB read")
    for writer in writers.values():
        writer.close(sequence_length=data.sequence_length, packing=data.packing)
    _require(source.label, share, tally, writers, lowest)
    return {
        "source": {"path": source.label, "fingerprint": source.fingerprint()},
        "source_files": [[file.path, file.size, file.mtime_ns] for file in source.files],
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint, "size": size},
        "chat_template": tokenizer.tokenizer.chat_template,
        "sequence_length": data.sequence_length,
        "packing": data.packing,
        "dtype": dtype.str,
        "counts": tally.as_counts(),
        "splits": {
            split: {
                "documents": len(writer.lengths), "tokens": writer.num_tokens, "loss_tokens": writer.num_loss_tokens,
                "samples": writer.num_samples, "text_bytes": writer.text_bytes,
                "padding": writer.num_samples * data.sequence_length - writer.num_tokens,
            }
            for split, writer in writers.items()
        },
        "seconds": round(time.monotonic() - started, 3),
    }  # fmt: skip


def _kept(found: Iterator[Conversation], *, length: int, tally: ConversationTally) -> Iterator[Conversation]:
    """The conversations with something to learn in their first `length` tokens, cut there; all of them counted."""
    for one in found:
        if not one.counts[1:].any():
            tally.unanswered += 1
            continue
        if not one.counts[1:length].any():
            tally.cut += 1
            continue
        tally.conversations += 1
        if len(one.ids) > length:
            tally.truncated += 1
            tally.truncated_tokens += len(one.ids) - length
            tally.truncated_loss_tokens += int(one.counts[length:].sum())
            one = one._replace(ids=one.ids[:length], counts=one.counts[:length])
        yield one


def _require(
    label: str, share: float, tally: ConversationTally, writers: dict[str, ConversationWriter], lowest: float
) -> None:
    """ValueError where nothing is left to train on, or nothing is held out."""
    if tally.conversations == 0:
        bad = f"; the first broken row: {tally.first_bad}" if tally.first_bad else ""
        raise ValueError(
            f"data.sources path={label}: no conversation in {tally.rows} rows ({tally.empty} empty, {tally.absent} "
            f"without one, {tally.unanswered} without an answer, {tally.cut} with none before data.sequence_length "
            f"ends, {tally.bad} broken){bad}"
        )
    if share < 1 and not writers["train"].lengths:
        raise ValueError(f"data.validation_fraction={share} leaves no conversation of {label} to train on; lower it")
    if share > 0 and not writers["validation"].lengths:
        enough = min(0.5, round(lowest / 2.0**64 * 1.01 + 1e-4, 4))
        raise ValueError(
            f"data.validation_fraction={share} holds out none of the {tally.conversations} conversations of "
            f"{label}; set {enough} for at least one, 0 for no validation, or data.validation_sources"
        )
