"""One row of a corpus before anything is judged about it, and the messages that all readers share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Row(NamedTuple):
    """path and number (line or row, from 1; None: the whole file) say where; value: what the wanted columns hold."""

    path: str
    number: int | None
    value: object = None
    problem: str | None = None

    def where(self) -> str:
        return self.path if self.number is None else f"{self.path}:{self.number}"


@dataclass(frozen=True)
class Columns:
    """What is read of a row: the first of `alternatives` whose columns it has, all of them.

    of_text: a column of another type than text is an error of the file. knobs: those that name the columns.
    """

    alternatives: tuple[tuple[str, ...], ...]
    of_text: bool = True
    knobs: str = "text_column of this data.sources entry"

    def chosen(self, names: Iterable[str]) -> tuple[str, ...]:
        """The alternative that a row with these columns is read by; empty where there is none."""
        present = set(names)
        return next((one for one in self.alternatives if present.issuperset(one)), ())

    def value(self, record: Mapping[str, Any]) -> Any:
        """What a row holds: of one column the value, of several all by name, None where there is none."""
        chosen = self.chosen(record)
        if len(chosen) > 1:
            return {name: record[name] for name in chosen}
        return record[chosen[0]] if chosen else None

    def missing(self, path: str, names: Iterable[str]) -> str:
        """That a file has none of them, in words."""
        wanted = ", or ".join(" and ".join(map(repr, one)) for one in self.alternatives)
        present = ", ".join(map(str, names)) or "none"
        return f"{path}: no column {wanted}; it has {present}: set {self.knobs}"
