"""A model that is described by a config.json in place of a YAML in conf/model/.

    python recipes/pretrain.py model=FOLDER initialize_from=FOLDER ...

`model=` takes a config.json, or a folder of transformers or of ours (imported, a checkpoint, its weights/). It is read
before Hydra composes, and stands as one override a knob, so that everything after sees plain knobs. A word without
a slash is an option of conf/model/. Not here: what the keys mean (`conf.huggingface`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from conf.huggingface import CONFIG, model_of, read_config
from conf.load import ConfigError, to_plain
from conf.schema import ModelConfig

WEIGHTS = "weights"  # of a checkpoint or an imported folder: where its config.json is


def expanded(arguments: Sequence[str]) -> list[str]:
    """The overrides with each model=FOLDER as knobs, first, so that model.KNOB=... still rules. Raises ConfigError."""
    kept, knobs = [], []
    for text in arguments:
        value = text.removeprefix("model=")
        if not names_folders(text) or "," in text:
            kept.append(text)
            continue
        try:
            knobs += overrides_of(model_in(Path(value)))
        except ValueError as error:
            raise ConfigError([f"model={value}: {line}" for line in str(error).splitlines()]) from None
    return knobs + kept


def names_folders(text: str) -> bool:
    """Whether an override says model=FOLDER, or is a sweep with one."""
    value = text.removeprefix("model=")
    return value != text and ("/" in value or value.endswith(".json")) and not any(sign in value for sign in "{}[]")


def model_in(path: Path) -> ModelConfig:
    """The model of a config.json or of a folder with one, named after the folder. Raises ValueError."""
    path = path.expanduser().absolute()
    if (path / WEIGHTS / CONFIG).is_file():
        path /= WEIGHTS
    if not path.exists():
        raise ValueError(f"{path} does not exist; name a folder with a {CONFIG}, or an option of conf/model/")
    return model_of(read_config(path), name=label_of(path))


def label_of(path: Path) -> str:
    """A name for logs: the folder's, in letters that a command line and a file's name can hold."""
    folder = path.parent if path.name == CONFIG else path
    folder = folder.parent if folder.name == WEIGHTS else folder
    return re.sub(r"\W+", "_", folder.name).strip("_").lower() or "model"


def overrides_of(model: ModelConfig) -> list[str]:
    """A Hydra override for each knob, over an option whose dicts are empty: Hydra adds to what is there."""
    return ["model=llama_tiny", *(f"model.{key}={_typed(value)}" for key, value in to_plain(model).items())]


def _typed(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_typed(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(_typed, value))}]"
    return "null" if value is None else value if isinstance(value, str) else json.dumps(value)


def model_yaml(model: ModelConfig, *, comment: str) -> str:
    """The model as a file of conf/model/: the knobs that differ from their defaults."""
    lines = [f"# {line}" for line in comment.splitlines()]
    for field in fields(model):
        value = to_plain(getattr(model, field.name))
        default = field.default if field.default is not MISSING else {}
        if field.name in ("name", "family") or value != to_plain(default):
            lines.append(f"{field.name}: {_yaml(value)}")
    return "\n".join(lines) + "\n"


def _yaml(value: Any) -> str:
    """JSON, which YAML reads; exponents with the point that YAML's numbers have."""
    if isinstance(value, float):
        text = repr(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    return value if isinstance(value, str) else json.dumps(value)
