"""A checkpoint's or an imported folder's weights as a folder that transformers loads: `recipes/convert.py export`.

    OUT/  model-0000N-of-0000M.safetensors with an index (or one file), config.json, generation_config.json, tokenizer

An imported folder comes back as it was: each tensor's own dtype, name and bits, and its config.json. A run's weights
are its fp32 masters, or `dtype`. A tied head is not written beside the embedding: transformers ties them. Every value
is checked against the manifest on its way; one tensor at a time is in memory. Not here: `engine.weights_import`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.huggingface import CONFIG
from conf.huggingface_config import huggingface_config
from conf.load import from_plain
from conf.schema import Config
from corpus.tokenizer_folder import copy_files, token_ids, write_tokenizer
from engine.checkpoint_folder import MANIFEST, WEIGHTS, list_checkpoints, read_manifest
from engine.safetensors_files import DTYPES, Spec, TensorFolder, TensorWriter
from engine.storage import Checksum, digest_of
from engine.weights_import import GENERATION, new_folder
from model.huggingface_names import stored_tensors
from parallel.objectives import objective_of

SHARD_BYTES = 5_000_000_000  # transformers' own max_shard_size
CHOICES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class Stored:
    """A folder of ours: its manifest, the config it was saved under, and its weights."""

    path: Path
    manifest: dict[str, Any]
    config: Config
    tensors: TensorFolder

    @property
    def origin(self) -> Mapping[str, Any] | None:
        """Of an imported folder: the folder it was read from."""
        return self.manifest.get("origin")


@dataclass(frozen=True)
class Exported:
    """What was written. `notes`: what is not as a reader may expect, in words."""

    stored: Stored
    tensors: int
    bytes: int
    dtypes: tuple[str, ...]
    has_tokenizer: bool
    notes: list[str] = field(default_factory=list)


def open_stored(path: Path) -> Stored:
    """A checkpoint, the newest of a run, or an imported folder. Raises ValueError."""
    path = path.expanduser().absolute()
    if not path.is_dir():
        raise ValueError(f"{path} is no folder; name a checkpoint step-N, a run, or an imported folder")
    newest = [*list_checkpoints(path), *list_checkpoints(path / "checkpoints")]
    if not (path / MANIFEST).is_file() and newest:
        path = newest[-1][1]
    if not (path / MANIFEST).is_file():
        raise ValueError(f"{path} holds no complete checkpoint; name a checkpoint step-N, a run, or an imported folder")
    manifest = read_manifest(path)
    if manifest.get("base") is not None:
        raise ValueError(
            f"{path} holds adapters, no whole weights; recipes/convert.py adapter writes them for PEFT, merge adds "
            "them to the weights that they stand beside"
        )
    config, tensors = from_plain(manifest["config"]), TensorFolder(path / WEIGHTS)
    wanted = {place.name for place in stored_tensors(config.model).values()}
    if wanted != set(tensors.places):
        different = min(wanted ^ set(tensors.places))
        raise ValueError(
            f"{path / WEIGHTS} does not hold the model of its manifest: {different} is in one of them only"
        )
    return Stored(path, manifest, config, tensors)


def export_weights(
    stored: Stored, out: Path, *, dtype: str | None, max_bytes: int, tokenizer: str | None, say: Callable[[str], None]
) -> Exported:
    """Write `out`, which must not exist yet. `dtype`: one of CHOICES; None: as imported, fp32 of a run.

    `tokenizer`: in place of the run's data.tokenizer. Raises ValueError, and leaves nothing half written.
    """
    origin = stored.origin or {}
    names, dtypes = origin.get("names", {}), {} if dtype else origin.get("dtypes", {})
    plain = CHOICES[dtype or "fp32"]
    wanted = {
        name: Spec(dtypes.get(name, plain), place.spec.shape) for name, place in sorted(stored.tensors.places.items())
    }
    called = {name: names.get(name, name) for name in wanted}
    with new_folder(out) as partial:
        _write_tensors(stored, wanted, called, TensorWriter(
            partial, {called[name]: spec for name, spec in wanted.items()}, max_bytes=max_bytes
        ), say)  # fmt: skip
        notes: list[str] = []
        ids, has_tokenizer = _write_tokenizer(stored, partial, tokenizer, notes)
        used = tuple(sorted({spec.dtype for spec in wanted.values()}))
        config = _config(stored, ids, used)
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        _write_generation(stored, partial, config)
    total = sum(spec.bytes for spec in wanted.values())
    return Exported(stored, len(wanted), total, used, has_tokenizer, notes)


def _write_tensors(
    stored: Stored, wanted: Mapping[str, Spec], called: Mapping[str, str], writer: TensorWriter,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    checksums: dict[str, list[Checksum]] = {}
    for one in stored.manifest["checksums"]:
        if one["file"].startswith(f"{WEIGHTS}/"):
            checksums.setdefault(one["tensor"], []).append(Checksum(**one))
    try:
        for number, (name, spec) in enumerate(wanted.items(), start=1):
            tensor = stored.tensors.read(name)
            _check(stored, name, tensor, checksums.get(name, []))
            writer.write(called[name], _cast(tensor, spec.dtype, name))
            if number % 100 == 0:
                say(f"{number} of {len(wanted)} tensors")
        writer.finish()
    finally:
        writer.close()


def _check(stored: Stored, name: str, tensor: Tensor, checksums: list[Checksum]) -> None:
    """Raises ValueError where the values are not those that were written."""
    values = 0
    for one in checksums:
        box = tensor[tuple(slice(a, a + n) for a, n in zip(one.offsets, one.sizes, strict=True))]
        values += box.numel()
        if digest_of(box) != one.xxh3_64:
            raise ValueError(f"{stored.path} is damaged: the values of {name} are not those that were written")
    if values != tensor.numel():
        raise ValueError(f"{stored.path} is damaged: its manifest has checksums of {values} values of {name}")


def _cast(tensor: Tensor, dtype: str, name: str) -> Tensor:
    cast = tensor.to(DTYPES[dtype])
    if dtype == "F16" and not torch.equal(cast.isfinite(), tensor.isfinite()):
        largest = tensor[tensor.isfinite()].abs().max().item()
        raise ValueError(f"{name} has values up to {largest:.3g}, which fp16 does not hold (65504); use --dtype bf16")
    return cast


def _write_tokenizer(
    stored: Stored, out: Path, given: str | None, notes: list[str]
) -> tuple[dict[str, Any], bool]:  # fmt: skip
    """(token ids of config.json, whether a tokenizer is there)."""
    if given is None and stored.origin is not None:
        ids = token_ids(stored.path / WEIGHTS)
        if copy_files(stored.path / WEIGHTS, out):
            return ids, True
        notes.append("no tokenizer: the folder that was imported had none; --tokenizer names one")
        return ids, False
    data = stored.config.data if given is None else dataclasses.replace(stored.config.data, tokenizer=given)
    try:
        return write_tokenizer(data, out, objective=objective_of(stored.config.model.family)), True
    except (ValueError, OSError) as error:
        notes.append(f"no tokenizer: {error}; --tokenizer names where it is")
        return {}, False


def _config(stored: Stored, ids: dict[str, Any], dtypes: tuple[str, ...]) -> dict[str, Any]:
    """As it was imported, or of the model; `dtype` names the weights' where they have one in common."""
    dtype = TORCH_NAMES[dtypes[0]] if len(dtypes) == 1 else None
    if stored.origin is None:
        return huggingface_config(stored.config.model, dtype=dtype or "float32") | ids
    config = dict(stored.origin["config"])
    for key in ("dtype", "torch_dtype"):
        if key in config and dtype is not None:
            config[key] = dtype
    return config


def _write_generation(stored: Stored, out: Path, config: Mapping[str, Any]) -> None:
    """The imported folder's, or that of the tokenizer's folder, or the token ids alone."""
    name = stored.config.data.tokenizer
    for folder in (stored.path / WEIGHTS, Path(name).expanduser()):
        if (folder / GENERATION).is_file():
            shutil.copyfile(folder / GENERATION, out / GENERATION)
            return
    ids = {key: value for key, value in config.items() if key.endswith("_token_id") and value is not None}
    (out / GENERATION).write_text(json.dumps({"_from_model_config": True, **ids}, indent=2) + "\n")
