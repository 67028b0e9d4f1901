"""What was prepared, as a small table for people."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from corpus.prepare import PreparedCorpus

HEADER = ("source", "weight", "split", "documents", "tokens", "samples", "MB of text", "bytes/token")


def table(corpus: PreparedCorpus) -> str:
    """One row a source and split, then what was left out and where the files are."""
    rows: list[tuple[str, ...]] = [HEADER]
    notes = []
    for number, source in enumerate(corpus.sources):
        for split, blend in (("train", corpus.train), ("validation", corpus.validation)):
            if blend is None:
                continue
            part = source.manifest["splits"][split]
            ids, text = max(1, part["tokens"] - part["documents"]), part["text_bytes"]
            rows.append(
                (
                    source.label,
                    f"{source.weight:g}",
                    split,
                    f"{part['documents']:,}",
                    f"{part['tokens']:,}",
                    f"{len(blend.streams[number]):,}",
                    *(("-", "-") if text is None else (f"{text / 1e6:.2f}", f"{text / ids:.2f}")),
                )
            )
        counts = source.manifest["counts"]
        notes.append(
            f"{source.label}: {_left_out(counts)}; {source.dropped_tokens:,} targets at the end fill no sample"
        )
        if counts["first_bad"]:
            notes.append(f"  first broken row: {counts['first_bad']}")
        notes += [f"  {note}" for note in (_repeated(counts), _closed(source.manifest)) if note]
        notes.append(f"  in {source.folder.absolute()}")
    lines = aligned(rows, left=(0, 2))
    tokenizer = corpus.tokenizer
    notes.append(f"tokenizer {tokenizer.name}: {tokenizer.size:,} ids, end of document {tokenizer.eod_id}")
    return "\n".join([*lines, *notes, *corpus.notes])


def aligned(rows: Sequence[Sequence[str]], *, left: Container[int]) -> list[str]:
    """Lines of a table; the columns `left` begin at the left, the others end at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _left_out(counts: dict[str, Any]) -> str:
    if "closed" in counts:
        line = f"{counts['rows']:,} documents, left out {counts['empty']:,} empty"
        return line + (f", {counts['left_out']:,} of neither split" if counts["left_out"] else "")
    return (
        f"{counts['rows']:,} rows, left out {counts['empty']:,} empty, {counts['absent']:,} without text, "
        f"{counts['bad']:,} broken"
    )


def _repeated(counts: dict[str, Any]) -> str:
    number = counts.get("duplicates", 0)  # corpora that were prepared before it was counted lack it
    if not number:
        return ""
    about = "" if counts["duplicates_of_every"] == 1 else "about "
    return f"{about}{number:,} documents repeat an earlier one; they are kept"


def _closed(manifest: dict[str, Any]) -> str:
    """Of Megatron data: what was done about ends of documents."""
    counts, eod_id = manifest["counts"], manifest["eod_id"]
    if "closed" not in counts:
        return ""
    opened = counts["documents"] - counts["closed"]
    line = f"end of document {eod_id}: at the end of {counts['closed']:,} documents in the file, put after {opened:,}"
    inside = counts["eod_inside"]
    return line + (f"; {inside:,} more inside documents, which do not part them" if inside else "")
