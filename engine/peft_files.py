"""Adapters as files: out of a checkpoint in PEFT's format, and merged into the weights that they stand beside.

Works on transformers' names alone: it needs neither the model nor a process group, and holds one file of the base at a
time. Merging is W + alpha / r * B A, in fp32, written in the base's own type and files.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.checkpoint_folder import ADAPTER_CONFIG, MANIFEST, WEIGHTS, list_checkpoints, read_manifest
from engine.storage import weight_map, weights_fingerprint

PEFT_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."


def export_adapter(source: Path, target: Path) -> dict[str, Any]:
    """Write the adapters of a checkpoint (or its weights/) as `peft.PeftModel.from_pretrained` reads them; returns
    adapter_config.json.

    ValueError where there are none, or `target` is not empty.
    """
    folder, about = opened_adapter(source)
    _require_empty(target)
    tensors = {name: _read(folder / file, name) for name, file in weight_map(folder).items()}
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / PEFT_FILE, metadata={"format": "pt"})
    (target / ADAPTER_CONFIG).write_text(json.dumps(about, indent=2) + "\n")
    return about


def merge_adapter(source: Path, base: Path, target: Path) -> int:
    """Write `base` (a folder of transformers) with the adapters added, all its other files as they are; the number of
    merged matrices. ValueError where an adapter names a matrix that `base` lacks, or one of another shape.
    """
    folder, about = opened_adapter(source)
    base = base / WEIGHTS if (base / WEIGHTS).is_dir() else base
    files, held = weight_map(base), weight_map(folder)
    _require_empty(target)
    modules = sorted({name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in held})
    called = {module: _name_in(files, module, base) for module in modules}
    updates = {weight: module for module, weight in called.items()}
    scaling = about["lora_alpha"] / about["r"]
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(set(files.values())):
        tensors = {}
        for name in [name for name, at in files.items() if at == file]:
            tensors[name] = _read(base / file, name)
            if name in updates:
                a, b = (_read(folder / held[key], key) for key in _pair(updates[name]))
                tensors[name] = _merged(tensors[name], a, b, scaling, name, transposed=about["fan_in_fan_out"])
        save_file(tensors, target / file, metadata={"format": "pt"})
    for path in base.iterdir():
        if path.is_file() and path.name not in files.values():
            shutil.copy2(path, target / path.name)
    return len(modules)


def checkpoint_of(source: Path) -> Path:
    """A checkpoint with adapters, or the newest of a run; any other folder as it is. ValueError where there is none."""
    path = source.expanduser().absolute()
    if not path.is_dir():
        raise ValueError(f"{path} is no folder; name a checkpoint step-N, a run, or a folder of PEFT's")
    newest = [*list_checkpoints(path), *list_checkpoints(path / "checkpoints")]
    return newest[-1][1] if newest and not (path / MANIFEST).is_file() else path


def base_of(checkpoint: Path) -> Path:
    """The folder of weights that a checkpoint's adapters were trained beside. ValueError where it is not there, or
    no longer holds the same.
    """
    base = read_manifest(checkpoint).get("base") if (checkpoint / MANIFEST).is_file() else None
    if base is None or base["initialize_from"] is None:
        raise ValueError(f"{checkpoint} names no folder of weights that its adapters stand beside; give --base FOLDER")
    folder = Path(base["initialize_from"])
    if not folder.is_dir():
        raise ValueError(f"{folder}, beside whose weights {checkpoint} was trained, is not here; give --base FOLDER")
    if weights_fingerprint(folder) != base["fingerprint"]:
        raise ValueError(f"{folder} is not what {checkpoint} was trained beside any more; give --base FOLDER")
    return folder


def opened_adapter(source: Path) -> tuple[Path, dict[str, Any]]:
    """(folder of the safetensors, adapter_config.json) of a checkpoint with adapters, or of a PEFT folder."""
    folder = source / WEIGHTS if (source / WEIGHTS).is_dir() else source
    try:
        about = json.loads((folder / ADAPTER_CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{source} holds no adapters: {folder / ADAPTER_CONFIG} cannot be read ({error})") from None
    unknown = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save")
    odd = [key for key in unknown if about.get(key)]
    if about.get("peft_type") != "LORA" or about.get("bias", "none") != "none" or odd:
        raise ValueError(f"{folder / ADAPTER_CONFIG}: {', '.join(odd) or 'its kind'} is not known here; plain LoRA is")
    return folder, about


def _require_empty(target: Path) -> None:
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{target} is not empty; name a new folder")


def _pair(module: str) -> tuple[str, str]:
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


def _name_in(files: Any, module: str, base: Path) -> str:
    """The weight of a module in a folder, which may leave out the model's prefix (base models saved by themselves)."""
    for name in (f"{module}.weight", f"{module.partition('.')[2]}.weight"):
        if name in files:
            return name
    raise ValueError(f"{base} has no tensor {module}.weight, which the adapters belong to; name their own base")


def _read(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as opened:
        return opened.get_tensor(name)


def _merged(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, name: str, *, transposed: bool
) -> torch.Tensor:
    delta = scaling * (b.float() @ a.float())
    delta = delta.t() if transposed else delta
    if delta.shape != weight.shape:
        raise ValueError(f"{name} is {tuple(weight.shape)}, its adapter is for {tuple(delta.shape)}; another model's?")
    return (weight.float() + delta).to(weight.dtype).contiguous()
