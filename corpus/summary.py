"""What was prepared, as a small table for people."""

from __future__ import annotations

from collections.abc import Container, Sequence

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
            ids = max(1, part["tokens"] - part["documents"])
            rows.append(
                (
                    source.label,
                    f"{source.weight:g}",
                    split,
                    f"{part['documents']:,}",
                    f"{part['tokens']:,}",
                    f"{len(blend.streams[number]):,}",
                    f"{part['text_bytes'] / 1e6:.2f}",
                    f"{part['text_bytes'] / ids:.2f}",
                )
            )
        counts = source.manifest["counts"]
        notes.append(
            f"{source.label}: {counts['rows']:,} rows, left out {counts['empty']:,} empty, {counts['absent']:,} without"
            f" text, {counts['bad']:,} broken; {source.dropped_tokens:,} targets at the end fill no sample"
        )
        if counts["first_bad"]:
            notes.append(f"  first broken row: {counts['first_bad']}")
        notes.append(f"  in {source.folder.absolute()}")
    lines = aligned(rows, left=(0, 2))
    tokenizer = corpus.tokenizer
    notes.append(f"tokenizer {tokenizer.name}: {tokenizer.size:,} ids, end of document {tokenizer.eod_id}")
    return "\n".join(lines + notes)


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
