"""From DataConfig to datasets of masked language modelling (objective=mlm): the token files of prepare.py, packed.

Tokenised text is the same as for causal runs and is shared with them; beside it lie tables of which documents share a
sample (packed_documents.py), made once for a sequence length and a frame. Same caches and promises as prepare.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.schema import DataConfig
from corpus.cache import Progress
from corpus.dataset import Blend
from corpus.mask_tokens import MaskTokens, mask_tokens, require_mask
from corpus.masked_stream import MaskedStream
from corpus.packed_documents import FORMAT, PackedDocuments, write_packed
from corpus.prepare import PreparedCorpus, PreparedSource, built_source, digest_of, token_stream, tokenised
from corpus.sources import ResolvedSource

SPLITS = ("train", "validation")
_Opened = tuple[ResolvedSource, Path, dict[str, Any]]


def prepare_masked(
    data: DataConfig, *, vocab_size: int, seed: int, weights: bool = False, progress: Progress | None = None
) -> PreparedCorpus:
    """The corpus of `data` for a masked language model. ValueError as `prepare`; and a tokenizer without a mask."""
    tell: Progress = progress or (lambda line: None)
    resolved, tokenizer, opened = tokenised(data, vocab_size=vocab_size, weights=weights, progress=tell)
    masks = mask_tokens(tokenizer)
    require_mask(masks, tokenizer, vocab_size=vocab_size, weights=weights)
    if data.sequence_length <= masks.frame:
        raise ValueError(
            f"data.sequence_length={data.sequence_length} has no room for a token beside the {masks.frame} that frame "
            f"a text; use at least {masks.frame + 1}"
        )
    token_files: list[_Opened] = [(source, *one) for source, one in zip(resolved, opened, strict=True)]
    tables = [_packed(*one, data=data, frame=masks.frame, progress=tell) for one in token_files]
    options: dict[str, Any] = dict(data=data, seed=seed, masks=masks)
    train = _blend(token_files, tables, split="train", **options)
    held_out = data.validation_fraction > 0
    validation = _blend(token_files, tables, split="validation", **options) if held_out else None
    sources = tuple(
        PreparedSource(source.label, source.source.weight, folder, manifest, len(stream), 0)
        for (source, folder, manifest), stream in zip(token_files, train.streams, strict=True)
    )
    identity = [FORMAT, "mlm", tokenizer.fingerprint, masks.identity, data.sequence_length, data.mask_documents, seed]
    identity += [[source.weight, source.manifest.get("content", source.manifest["files"])] for source in sources]
    notes = tuple(_note(source, manifest) for source, (_, manifest) in zip(sources, tables, strict=True))
    return PreparedCorpus(train, validation, tokenizer, sources, digest_of(identity), notes)


def _packed(
    source: ResolvedSource, folder: Path, manifest: dict[str, Any], *, data: DataConfig, frame: int, progress: Progress
) -> tuple[Path, dict[str, Any]]:
    """(folder, manifest) of the tables of one source."""
    key = digest_of([FORMAT, "packed", manifest["key"], data.sequence_length, frame])

    def build(partial: Path, tell: Progress) -> dict[str, Any]:
        tell(f"{source.label}: packing documents into samples of {data.sequence_length} tokens")
        counts = {}
        for split in SPLITS:
            ends = token_stream(source, folder, manifest, split=split).ends
            counts[split] = write_packed(ends, partial, split=split, sequence_length=data.sequence_length, frame=frame)
        return {"format": FORMAT, "key": key, "sequence_length": data.sequence_length, "splits": counts}

    return built_source(f"{source.label}-packed", key, build, data=data, progress=progress)


def _blend(
    token_files: Sequence[_Opened], tables: Sequence[tuple[Path, dict[str, Any]]], *, split: str, data: DataConfig,
    seed: int, masks: MaskTokens,
) -> Blend:  # fmt: skip
    streams = [
        MaskedStream(
            token_stream(source, folder, manifest, split=split),
            PackedDocuments.open(packed, split=split),
            sequence_length=data.sequence_length,
            seed=seed,
            shuffle=split == "train",
            mask_documents=data.mask_documents,
            masks=masks,
            number=number,
            name=f"{split} part of data.sources[{number}]",
        )
        for number, ((source, folder, manifest), (packed, _)) in enumerate(zip(token_files, tables, strict=True))
    ]
    return Blend(streams, weights=[source.source.weight for source, _, _ in token_files])


def _note(source: PreparedSource, manifest: dict[str, Any]) -> str:
    found = manifest["splits"]["train"]
    share = found["padding"] / (found["samples"] * manifest["sequence_length"])
    return (
        f"{source.label}: {found['documents']:,} documents in {found['samples']:,} samples, {share:.1%} padding; "
        f"{found['cut']:,} longer than a sample were cut into pieces"
    )
