"""What `initialize_from=SOURCE` says of the model, for recipes that run weights and train none.

    python recipes/generate.py initialize_from=SOURCE ...

SOURCE is a run (its newest checkpoint), a checkpoint, an imported folder, or a folder of transformers. Its model,
adapters, number format, tokenizer and sequence length, of a run all knobs of its data, stand as overrides before those
of the command line, which so rule. Not here: what the keys of a config.json mean (`conf.huggingface`), reading weights
(`engine.weight_source`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from conf.huggingface import model_of, read_config
from conf.load import ConfigError, from_plain, to_plain
from conf.model_folders import WEIGHTS as WEIGHTS
from conf.model_folders import label_of, overrides_of
from conf.overrides import quoted
from conf.schema import DataConfig, DType, ModelConfig

MANIFEST = "manifest.json"
ADAPTER_CONFIG = "adapter_config.json"  # in weights/ where they are adapters: PEFT's
FORMATS = {  # as config.json and safetensors name them
    "float32": DType.fp32, "bfloat16": DType.bf16, "float16": DType.fp16,
    "F32": DType.fp32, "BF16": DType.bf16, "F16": DType.fp16,
}  # fmt: skip
OF_MODEL = ("tokenizer", "sequence_length", "mask_documents", "chat_template")  # knobs of data that weights go with
LONGEST = 1024  # tokens of a sequence for weights that no run of ours says it of: the Megatron paper's
# A group or a knob on the command line, and the first words of what the source then does not say.
ADAPTER = "lora.initialize_from="
CHOSEN = {
    "model=": ("model",), "lora=": ("lora.",), "precision=": ("precision.",), ADAPTER: ("lora.",),
    "data=": tuple(f"data.{field.name}=" for field in fields(DataConfig) if field.name not in OF_MODEL),
}  # fmt: skip


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every complete checkpoint, by number; other names are left alone."""
    found = []
    for path in folder.glob("step-*"):
        match = re.fullmatch(r"step-(\d+)", path.name)
        if match and (path / MANIFEST).is_file():
            found.append((int(match[1]), path))
    return sorted(found)


def resolved(source: str) -> Path:
    """The folder that SOURCE means: of a run the newest checkpoint. Raises ValueError where it does not exist."""
    path = Path(source).expanduser().absolute()
    if not path.is_dir():
        raise ValueError(
            f"{path} is no folder; name a run, a checkpoint step-N, an imported folder, or a folder of transformers"
        )
    if (path / MANIFEST).is_file():
        return path
    newest = [*list_checkpoints(path), *list_checkpoints(path / "checkpoints")]
    if not newest and (path / "checkpoints").is_dir():
        raise ValueError(f"{path} is a run without a complete checkpoint")
    return newest[-1][1] if newest else path


def with_source(arguments: Sequence[str], *, device: Callable[[], str]) -> list[str]:
    """The arguments after what their initialize_from= says, in overrides. Raises ConfigError.

    device: "cpu" or "cuda", asked where the number format depends on it.
    """
    given = [text.partition("=")[2] for text in arguments if text.startswith("initialize_from=")]
    if not given or any(sign in given[-1] for sign in "{}[],"):
        return list(arguments)
    value = given[-1].strip("'\"")
    if value in ("", "null"):
        return list(arguments)
    try:
        found = _overrides(resolved(value), device)
    except ConfigError as error:
        raise ConfigError([f"initialize_from={value}: {line}" for line in error.problems]) from None
    except ValueError as error:
        raise ConfigError([f"initialize_from={value}: {line}" for line in str(error).splitlines()]) from None
    chosen = (starts for word, starts in CHOSEN.items() if any(text.startswith(word) for text in arguments))
    aside = tuple(start for starts in chosen for start in starts)
    said = [text for text in found if not text.startswith(aside)]
    adapters = [text.removeprefix(ADAPTER).strip("'\"") for text in arguments if text.startswith(ADAPTER)]
    return said + (_adapter_overrides(adapters[-1]) if adapters else []) + list(arguments)


def _adapter_overrides(given: str) -> list[str]:
    """Shape and strength of the adapters in a folder of PEFT's, or of a checkpoint. Raises ConfigError."""
    folder = Path(given).expanduser().absolute()
    folder = folder / WEIGHTS if (folder / WEIGHTS).is_dir() else folder
    try:
        about = json.loads((folder / ADAPTER_CONFIG).read_text())
        targets = about["target_modules"]
        knobs = {"rank": about["r"], "alpha": about["lora_alpha"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError([f"{ADAPTER}{given} is no PEFT adapter ({error!r})"]) from None
    knobs["target_modules"] = [targets] if isinstance(targets, str) else targets
    return [f"lora.{key}={_typed(value)}" for key, value in knobs.items()]


def _overrides(path: Path, device: Callable[[], str]) -> list[str]:
    if (path / MANIFEST).is_file():
        model, lora, dtype, data = _ours(path)
    else:
        model, dtype, data = _theirs(path)
        lora = {}
    if dtype is DType.fp16 and device() == "cpu":
        dtype = DType.fp32  # which holds every value of fp16, and a CPU does not compute in that
    knobs = {f"lora.{key}": value for key, value in lora.items()} | {"precision.dtype": dtype.value}
    knobs |= {f"data.{key}": value for key, value in data.items()}
    return [*overrides_of(model), *(f"{key}={_typed(value)}" for key, value in knobs.items())]


def _ours(path: Path) -> tuple[ModelConfig, dict[str, Any], DType, dict[str, Any]]:
    """(model, knobs of lora, number format, knobs of data) of a checkpoint or an imported folder."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        config = from_plain(manifest["config"])
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path / MANIFEST} cannot be read: {error!r}") from None
    if "origin" in manifest:
        usual, _ = Counter(manifest["origin"]["dtypes"].values()).most_common(1)[0]
        return config.model, {}, FORMATS[usual], _data_of(path / WEIGHTS, config.model)
    adapters = {key: value for key, value in to_plain(config.lora).items() if key != "initialize_from"}
    lora = adapters if config.lora.rank > 0 else {}
    return config.model, lora, config.precision.dtype, to_plain(config.data)


def _theirs(path: Path) -> tuple[ModelConfig, DType, dict[str, Any]]:
    """(model, number format, knobs of data) of a folder of transformers."""
    if (path / ADAPTER_CONFIG).is_file():
        raise ValueError(
            "it holds adapters of PEFT, no whole weights; set lora.initialize_from to it and initialize_from to the "
            "weights that they stand beside"
        )
    config = read_config(path)
    model = model_of(config, name=label_of(path))
    return model, _format_of(config), _data_of(path, model)


def _format_of(config: Mapping[str, Any]) -> DType:
    return FORMATS.get(str(config.get("dtype") or config.get("torch_dtype")), DType.fp32)


def _data_of(folder: Path, model: ModelConfig) -> dict[str, Any]:
    return {"tokenizer": str(folder), "sequence_length": min(LONGEST, model.max_position_embeddings)}


def _typed(value: Any) -> str:
    """As Hydra's grammar reads it back."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list):
        return f"[{','.join(map(_typed, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_typed(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)
