"""What a preflight found, for people and machines: a row a check with a cell a host, and a remedy for each red cell.

Cells of a row that say the same are joined (w0..w63), so that any number of hosts fits. Not here: what is checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RED, GREEN, PLAIN = "\033[31m", "\033[32m", "\033[0m"


@dataclass(frozen=True)
class Cell:
    """Of one check on one host. ok: None where it was not looked at, for a reason that another row gives."""

    ok: bool | None
    text: str
    remedy: str = ""


UNKNOWN = Cell(None, "not checked")


def good(about: str = "") -> Cell:
    return Cell(True, f"ok: {about}" if about else "ok")


def wrong(text: str, remedy: str) -> Cell:
    return Cell(False, text, remedy)


@dataclass(frozen=True)
class Row:
    """A check on all hosts."""

    check: str
    cells: Mapping[str, Cell]

    @classmethod
    def over(cls, check: str, hosts: Sequence[str], cells: Mapping[str, Cell]) -> Row:
        """A host without a cell was not checked."""
        return cls(check, {host: cells.get(host, UNKNOWN) for host in hosts})

    @property
    def red(self) -> list[str]:
        return [host for host, cell in self.cells.items() if cell.ok is False]


def named(some: Iterable[str], of: Sequence[str]) -> str:
    """Hosts in words, in the order of `of`; three and more in a row as first..last."""
    wanted, runs = set(some), list[list[str]]()
    previous = False
    for host in of:
        if host in wanted:
            if previous:
                runs[-1].append(host)
            else:
                runs.append([host])
        previous = host in wanted
    return ", ".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs)


def text(rows: Sequence[Row], *, colours: bool) -> str:
    """The table, a remedy below for each red cell, and a line that sums up."""
    lines = [("check", "hosts", "finding", PLAIN)]
    for row in rows:
        check = row.check
        for cell, hosts in _joined(row).items():
            colour = {True: GREEN, False: RED, None: PLAIN}[cell.ok]
            lines.append((check, named(hosts, list(row.cells)), cell.text, colour))
            check = ""
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    lines.insert(1, (*("-" * width for width in widths), PLAIN))  # type: ignore[arg-type]
    shown = []
    for first, second, finding, colour in lines:
        painted = f"{colour}{finding}{PLAIN}" if colours and colour != PLAIN else finding
        shown.append(f"{first.ljust(widths[0])}  {second.ljust(widths[1])}  {painted}")
    return "\n".join([*shown, *_remedies(rows), "", summary(rows)])


def _joined(row: Row) -> dict[Cell, list[str]]:
    """Cells that are equal, with their hosts."""
    found: dict[Cell, list[str]] = {}
    for host, cell in row.cells.items():
        found.setdefault(cell, []).append(host)
    return found


def _remedies(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        for cell, hosts in _joined(row).items():
            if cell.ok is False:
                lines += [f"{named(hosts, list(row.cells))}: {row.check}: {cell.text}", f"    {cell.remedy}"]
    return ["", "what to do", *lines] if lines else []


def summary(rows: Sequence[Row]) -> str:
    hosts = list(rows[0].cells)
    red = [row for row in rows if row.red]
    if not red:
        return f"preflight: {len(rows)} checks on {len(hosts)} host{'s' * (len(hosts) > 1)}, nothing is wrong"
    where = named({host for row in red for host in row.red}, hosts)
    return f"preflight: {len(red)} of {len(rows)} checks found something wrong, on {where}"


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """For machines; ok of a cell is null where it was not looked at."""
    return {
        "ok": not any(row.red for row in rows),
        "hosts": list(rows[0].cells),
        "checks": {
            row.check: {
                host: {"ok": cell.ok, "text": cell.text} | ({"remedy": cell.remedy} if cell.remedy else {})
                for host, cell in row.cells.items()
            }
            for row in rows
        },
    }
