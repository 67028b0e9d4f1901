"""Files of one JSON object a line, of which a process that was killed while it wrote can leave one torn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def lines(path: Path) -> Iterator[Any]:
    """One item a line that is not empty, read as it is asked for; None for one that is no JSON. Nothing of no file."""
    if path.exists():
        with path.open() as file:
            yield from (parsed(line) for line in file if line.strip())


def rows(path: Path) -> list[Any]:
    """The whole lines."""
    return [row for row in lines(path) if row is not None]


def parsed(line: str) -> Any:
    """One line; None where it is no JSON."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None
