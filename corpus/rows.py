"""One row of a corpus before anything is judged about it, and the messages that all readers share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Row(NamedTuple):
    """path and number (line or row, from 1; None: the whole file) say where; value: what the text column holds."""

    path: str
    number: int | None
    value: object = None
    problem: str | None = None

    def where(self) -> str:
        return self.path if self.number is None else f"{self.path}:{self.number}"


def missing_column(path: str, column: str, names: Iterable[str]) -> str:
    present = ", ".join(map(str, names)) or "none"
    return f"{path}: no column {column!r}; it has {present}: set text_column of this data.sources entry"
