"""Folders of transformers' weights opened and checked, before anything is written or trained: which tensor is which,
whether each has the model's shape, whether a tied head is the embedding. Not here: what to do with them
(`engine.weights_import`; `engine.resume` for initialize_from).
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from conf.huggingface import CONFIG, model_of, read_config
from conf.huggingface_config import model_differences
from conf.schema import ModelConfig
from engine.safetensors_files import DTYPES, INDEX, NAMES, Spec, TensorFolder
from model.huggingface import whole_shapes
from model.huggingface_names import copies_in_folder, names_in_folder, tensor_differences
from parallel.architecture import architecture

OLD = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class Weights(Protocol):
    """A folder's tensors: `TensorFolder`, or `PickledFolder` of an old one."""

    @property
    def places(self) -> Mapping[str, Any]: ...

    def spec(self, name: str) -> Spec: ...

    def read(self, name: str) -> Tensor: ...


class PickledFolder:
    """pytorch_model.bin of older versions, mapped and unpickled without running any code of it."""

    def __init__(self, file: Path) -> None:
        try:
            self.places: Mapping[str, Tensor] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except (RuntimeError, OSError, pickle.UnpicklingError, EOFError, ValueError) as error:
            raise ValueError(
                f"{file} cannot be read ({str(error).splitlines()[0]}); save it again with transformers: "
                "AutoModel...from_pretrained(FOLDER).save_pretrained(OUT)"
            ) from None
        for name, tensor in self.places.items():
            if not isinstance(tensor, Tensor) or tensor.dtype not in NAMES:
                raise ValueError(f"{file}: {name} is no tensor of {', '.join(DTYPES)}")

    def spec(self, name: str) -> Spec:
        return Spec(NAMES[self.places[name].dtype], tuple(self.places[name].shape))

    def read(self, name: str) -> Tensor:
        return self.places[name].contiguous()


def open_weights(folder: Path) -> Weights:
    """Raises ValueError where the folder holds none, or not in a format that is read here."""
    if (folder / INDEX).exists() or any(folder.glob("*.safetensors")):
        return TensorFolder(folder)
    if (folder / OLD[1]).exists():
        raise ValueError(
            f"{folder} has its weights in several pytorch_model-*.bin; save them again with transformers: "
            "AutoModel...from_pretrained(FOLDER).save_pretrained(OUT)"
        )
    if (folder / OLD[0]).exists():
        return PickledFolder(folder / OLD[0])
    raise ValueError(f"{folder} holds no .safetensors file; name a folder as transformers' save_pretrained writes it")


def require_model(folder: Path, model: ModelConfig, *, said: str) -> None:
    """ValueError, its lines beginning with what the user `said`, where a folder's safetensors are not there, torn, or
    another model's.
    """
    try:
        differences = []
        if (folder / CONFIG).exists():
            differences = model_differences(model_of(read_config(folder), name=model.name), model)
        weights = open_weights(folder)
        if not isinstance(weights, TensorFolder):
            raise ValueError(f"{folder} holds no .safetensors file; recipes/convert.py import makes one of its weights")
        differences += problems_of(weights, model)
    except (ValueError, OSError) as error:
        raise ValueError("\n".join(f"{said}: {line}" for line in str(error).splitlines())) from None
    if differences:
        raise ValueError(f"{said} is another model: {'; '.join(differences)}")


def problems_of(weights: Weights, model: ModelConfig) -> list[str]:
    """Why these are not the model's weights: a tensor that is missing, of another shape or of no meaning, or a head
    that is not the embedding it is tied to. A line each; none where they are.
    """
    problems = tensor_differences(weights.places, model)
    called, _ = names_in_folder(weights.places, model)
    copies = copies_in_folder(model)
    shapes = whole_shapes(model)
    for ours, theirs in called.items():
        wanted, found = shapes[copies.get(ours, ours)], weights.spec(theirs).shape
        if wanted != found:
            problems.append(f"{theirs} is {list(found)}, the model needs {list(wanted)}")
    if not problems:
        problems += [
            _not_tied(called[copy], called[name], model)
            for copy, name in copies.items()
            if copy in called and not torch.equal(weights.read(called[copy]), weights.read(called[name]))
        ]
    return problems


def _not_tied(copy: str, name: str, model: ModelConfig) -> str:
    if architecture(model).head_transform:
        return f"the head is tied, but {copy} is not {name}; model.family={model.family.value} has one of them"
    return (
        f"the head is tied to the embedding, but {copy} is not {name}; set tie_word_embeddings to false in config.json "
        "to keep both"
    )


def called_there(weights: Weights, model: ModelConfig) -> dict[str, str]:
    """transformers' name -> the folder's, of every tensor that counts; a tied head does not."""
    called, _ = names_in_folder(weights.places, model)
    for copy in copies_in_folder(model):
        called.pop(copy, None)
    return called
