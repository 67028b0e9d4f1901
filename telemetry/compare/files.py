"""The files of a run as far as they are whole: what is torn, no JSON or of another kind is left out and noted.

A run may have been killed while it wrote, be of another version, or have been edited by hand.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
AXES = ("tokens", "flops", "hours")
METRICS = ("train/", "validation/", "pipeline/", "memory/", "communication/", "ranks/", "instruction/")
# Groups of a config and parts of an identity that are read by name.
GROUPS = ("model", "parallel", "zero", "precision", "data", "optimizer", "train", "cluster", "checkpoint", "run")
COUNTS = (("model", "num_layers"), ("train", "train_iters"), ("train", "global_batch_size"))
IDENTITY = {"hosts": list, "packages": dict, "profile": dict, "git_commit": str}


def json_lines(path: Path, notes: list[str]) -> list[Row]:
    """The rows of a .jsonl file; of lines that are none, which a killed run's last may be, one note tells."""
    if not path.exists():
        return []
    rows, torn = [], []
    for number, line in enumerate(path.read_text(errors="replace").split("\n"), start=1):
        try:
            row = json.loads(line) if line.strip() else {}
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows += [row] if row else []
        else:
            torn.append(number)
    if len(torn) == 1:
        notes.append(f"{path.name}:{torn[0]} is torn and left out")
    elif torn:
        notes.append(f"{path.name}: {len(torn)} lines are no rows and left out, the first is line {torn[0]}")
    return rows


def json_object(path: Path, notes: list[str]) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(errors="replace"))
    except FileNotFoundError:
        return None
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    notes.append(f"{path.name} is not a JSON object and left out")
    return None


def numbers(rows: Sequence[Row], notes: list[str]) -> list[Row]:
    """The rows of metrics without what is no number there."""
    wrong: Counter[str] = Counter()
    found = []
    for row in rows:
        bad = [key for key, value in row.items() if _is_metric(key) and not isinstance(value, (int, float))]
        wrong.update(bad)
        found.append({key: value for key, value in row.items() if key not in bad} if bad else row)
    notes += [f"{key} is no number in {count} rows and left out there" for key, count in wrong.items()]
    return found


def _is_metric(key: str) -> bool:
    return key in AXES or key.startswith(METRICS)


def config_of(given: Any, notes: list[str]) -> dict[str, Any]:
    """Without the groups and counts that are none."""
    config = dict(_object(given, "config", notes))
    for name in [name for name in GROUPS if not isinstance(config.get(name, {}), dict)]:
        notes.append(f"config: {name} is no group of knobs and left out")
        del config[name]
    for group, name in COUNTS:
        value = config.get(group, {}).get(name, 0)
        if not isinstance(value, int):
            notes.append(f"config: {group}.{name}={value} is no number and left out")
            config[group] = {key: one for key, one in config[group].items() if key != name}
    return config


def identity_of(given: Any, notes: list[str]) -> dict[str, Any]:
    identity = _object(given, "identity", notes)
    wrong = [name for name, kind in IDENTITY.items() if not isinstance(identity.get(name, kind()), (kind, type(None)))]
    notes += [f"identity: {name} is of another kind and left out" for name in wrong]
    return {key: value for key, value in identity.items() if key not in wrong and value is not None}


def _object(given: Any, name: str, notes: list[str]) -> Mapping[str, Any]:
    if isinstance(given, dict):
        return given
    if given is not None:
        notes.append(f"{name} is not a JSON object and left out")
    return {}


def plan_of(given: Any, notes: list[str]) -> dict[str, Any]:
    return dict(_object(given, "plan", notes))
