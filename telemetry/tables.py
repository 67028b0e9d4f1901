"""Plain-text tables for the start and the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns padded to their widest cell; numbers to the right."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    right = [all(_is_number(row[column]) for row in cells[1:]) for column in range(len(header))]
    lines = []
    for row in cells:
        padded = (
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, right, strict=True)
        )
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _is_number(cell: str) -> bool:
    return bool(cell) and cell[0] in "0123456789-+."


def size(number_of_bytes: float) -> str:
    """1234567 -> "1.2 MB" (decimal units)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(number_of_bytes) < 1000 or unit == "TB":
            return f"{number_of_bytes:.0f} B" if unit == "B" else f"{number_of_bytes:.1f} {unit}"
        number_of_bytes /= 1000
    raise AssertionError("unreachable")
