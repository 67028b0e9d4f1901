"""Names and sentences of all knobs, read from conf/schema.py and the YAML groups: for --help and for naming typos.

The sentence of a knob is the comment on its line in the schema; a group's is the docstring of its dataclass.
"""

from __future__ import annotations

import ast
import difflib
import io
import tokenize
import typing
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from conf import schema

CONF = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Knob:
    """`key`: dotted; `kind`: how a value is typed in; `default` as typed; `open_below`: a dict of any keys."""

    key: str
    kind: str
    default: str
    sentence: str
    open_below: bool = False
    item: Any = None  # dataclass of a list's items


@cache
def knobs() -> tuple[Knob, ...]:
    """Every leaf of the schema in its order."""
    return tuple(_knobs(schema.Config, "", _sentences()))


@cache
def rule_knobs() -> tuple[Knob, ...]:
    """The fields of each alert rule: alerts.NAME.FIELD."""
    return tuple(_knobs(schema.AlertRule, "alerts.NAME.", _sentences()))


def _knobs(kind: type, prefix: str, sentences: dict[tuple[str, str], str]) -> list[Knob]:
    hints = typing.get_type_hints(kind)
    found = []
    for field in fields(kind):
        key, hint = f"{prefix}{field.name}", hints[field.name]
        if is_dataclass(hint):
            found += _knobs(typing.cast(type, hint), f"{key}.", sentences)
            continue
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        found.append(
            Knob(
                key=key,
                kind=_kind(hint),
                default=_typed(default),
                sentence=sentences.get((kind.__name__, field.name), ""),
                open_below=any(typing.get_origin(part) is dict for part in (hint, *typing.get_args(hint))),
                item=next((part for part in typing.get_args(hint) if is_dataclass(part)), None),
            )
        )
    return found


@cache
def sections() -> tuple[str, ...]:
    """Dotted keys that hold other keys: model, telemetry.wandb, ..."""
    parts = [knob.key.split(".") for knob in knobs()]
    return tuple(dict.fromkeys(".".join(p[:n]) for p in parts for n in range(1, len(p))))


def names() -> list[str]:
    """Everything that may stand left of an =, but the groups: knobs, sections, fields of list items."""
    items = [f"{knob.key}.0.{field.name}" for knob in knobs() if knob.item for field in fields(knob.item)]
    return [*(knob.key for knob in knobs()), *items, *sections()]


def is_known(key: str) -> bool:
    """Whether a dotted key is a knob, a section, or lies inside a knob that holds a list or a dict."""
    if key in sections():
        return True
    for knob in knobs():
        if key == knob.key:
            return True
        if key.startswith(f"{knob.key}."):
            rest = key[len(knob.key) + 1 :].split(".")
            if knob.open_below:
                return True
            if knob.item is not None and rest[0].isdigit():
                return len(rest) == 1 or (len(rest) == 2 and rest[1] in {f.name for f in fields(knob.item)})
            return knob.kind.startswith("list") and len(rest) == 1 and rest[0].isdigit()
    return False


def options(folders: Iterable[Path] = (CONF,)) -> dict[str, list[str]]:
    """Group -> its options, from the YAML files in the folders."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for path in folder.glob("*/**/*.yaml"):
            group = path.parent.relative_to(folder).as_posix()
            found.setdefault(group, set()).add(path.stem)
    return {group: sorted(names) for group, names in sorted(found.items())}


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The word most like `word`, by its whole or by its last dotted part; None where nothing is alike."""
    best, score = None, 0.5
    tail = word.rsplit(".", 1)[-1]
    for candidate in words:
        whole = difflib.SequenceMatcher(None, word, candidate).ratio()
        end = difflib.SequenceMatcher(None, tail, candidate.rsplit(".", 1)[-1]).ratio()
        alike = max(whole, 0.85 * end)
        if alike > score:
            best, score = candidate, alike
    return best


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """ "; did you mean X?", or nothing."""
    found = nearest(word, words)
    return f"; did you mean {found}?" if found else ""


def _sentences() -> dict[tuple[str, str], str]:
    """(class, field) -> the comment on the field's last line."""
    files = (
        "schema.py",
        "recipe_schema.py",
        "alert_schema.py",
        "data_schema.py",
        "lora_schema.py",
        "evaluate_schema.py",
    )
    return {key: text for name in files for key, text in _sentences_of(CONF / name).items()}


def _sentences_of(path: Path) -> dict[tuple[str, str], str]:
    source = path.read_text()
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    return {
        (node.name, line.target.id): comments.get(line.end_lineno or line.lineno, "")
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def _kind(hint: Any) -> str:
    """int, float, list, one of an Enum's names, ..."""
    parts = [part for part in typing.get_args(hint) if part is not type(None)]
    if typing.get_origin(hint) is typing.Union:
        return f"{_kind(parts[0])} or null"
    if typing.get_origin(hint) is not None:
        return typing.get_origin(hint).__name__
    if issubclass(hint, Enum):
        return "|".join(member.name for member in hint)
    return hint.__name__


def _typed(value: Any) -> str:
    """A default as it would be typed on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list):
        return "[" + ", ".join(_typed(item) for item in value) + "]"
    if is_dataclass(value):
        return f"{{path: {value.path}}}" if isinstance(value, schema.CorpusSource) else "{...}"
    return f"{value:g}" if isinstance(value, float) else str(value)
