"""What became of conversations, in words: two lines a source at each start of a run, a table for recipes/prepare.py."""

from __future__ import annotations

from collections.abc import Sequence

from corpus.prepare import PreparedCorpus, PreparedSource
from corpus.summary import aligned

HEADER = ("source", "weight", "split", "conversations", "tokens", "learnt", "samples", "padding")


def notes(sources: Sequence[PreparedSource]) -> tuple[str, ...]:
    """Samples and what the sequence length cut off, a line a source."""
    return tuple(map(_note, sources))


def _note(source: PreparedSource) -> str:
    counts, splits = source.manifest["counts"], source.manifest["splits"]
    held = ", ".join(
        f"{split['documents']:,} conversations in {split['samples']:,} samples ({name})"
        for name, split in splits.items()
        if split["documents"]
    )
    line = f"{source.label}: {held}"
    if counts["truncated"] or counts["cut"]:
        line += (
            f"; data.sequence_length={source.manifest['sequence_length']} cut {counts['truncated']:,} of them by "
            f"{counts['truncated_tokens']:,} tokens ({counts['truncated_loss_tokens']:,} of the assistant's) and left "
            f"out {counts['cut']:,} with none of the assistant's"
        )
    return line


def conversation_table(corpus: PreparedCorpus) -> str:
    """One row a source and split, then what was left out and where the files are."""
    rows: list[tuple[str, ...]] = [HEADER]
    lines = []
    for source in corpus.sources:
        for name, split in source.manifest["splits"].items():
            if split["documents"]:
                numbers = (split[key] for key in ("documents", "tokens", "loss_tokens", "samples"))
                slots = split["tokens"] + split["padding"]
                share = f"{split['padding'] / slots:.1%}"
                rows.append((source.label, f"{source.weight:g}", name, *(f"{n:,}" for n in numbers), share))
        counts = source.manifest["counts"]
        lines.append(_note(source))
        lines.append(
            f"  {counts['rows']:,} rows, left out {counts['empty']:,} empty, {counts['absent']:,} without a "
            f"conversation, {counts['unanswered']:,} without an answer, {counts['cut']:,} cut before it, "
            f"{counts['bad']:,} broken"
        )
        if counts["first_bad"]:
            lines.append(f"  first broken row: {counts['first_bad']}")
        lines.append(f"  in {source.folder.absolute()}")
    tokenizer = corpus.tokenizer
    lines.append(f"tokenizer {tokenizer.name}: {tokenizer.size:,} ids, end of text {tokenizer.eod_id}")
    return "\n".join([*aligned(rows, left=(0, 2)), *lines])
