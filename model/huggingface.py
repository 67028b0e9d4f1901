"""Weights to and from transformers' language models, as whole tensors.

Works on canonical tensors (see `model.tensor_parallel.parameter`), so it knows nothing of plans; what is called what
stands in `model.huggingface_names`. Not here: reading or writing files (`engine`), config.json (`conf.huggingface`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from conf.schema import ModelConfig
from model.huggingface_names import Stored, copies_in_folder, stored_tensors
from model.layers import Transformer, build_layer_specs
from model.placement import boxes
from model.tensor_parallel.parameter import from_canonical, slice_for_rank
from model.tensor_parallel.random import RandomStreams
from parallel.groups import SINGLE, AxisGroup


def to_huggingface_state(canonical: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Canonical whole tensors -> a transformers state dict, a tied head's tensors included.

    Raises ValueError naming a tensor that is missing.
    """
    state = to_stored(canonical, stored_tensors(model))
    return state | {copy: state[name] for copy, name in copies_in_folder(model).items()}


def to_stored(canonical: Mapping[str, Tensor], places: Mapping[str, Stored]) -> dict[str, Tensor]:
    """Canonical whole tensors -> those that `places` (canonical name -> its place) makes of them."""
    pieces: dict[Stored, list[Tensor]] = {}
    for ours, place in places.items():
        pieces.setdefault(replace(place, part=0), []).append(_take(canonical, ours))
    state = {}
    for place, parts in pieces.items():
        tensor = _joined(parts, place.turn)
        state[place.name] = tensor.t().contiguous() if place.transposed else tensor
    return state


def from_huggingface_state(state: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """A transformers state dict -> canonical whole tensors. Raises ValueError naming a tensor that is missing."""
    return from_stored(state, stored_tensors(model))


def from_stored(state: Mapping[str, Tensor], places: Mapping[str, Stored]) -> dict[str, Tensor]:
    """The inverse of `to_stored`."""
    canonical = {}
    for ours, place in places.items():
        tensor = _take(state, place.name)
        canonical[ours] = _part(tensor.t() if place.transposed else tensor, place).contiguous()
    return canonical


def whole_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of each tensor of the transformers state dict, the head of its own included; nothing is allocated."""
    streams = RandomStreams(tensor_rank=0)
    specs = build_layer_specs(
        model, tensor=SINGLE, streams=streams, padded_vocab_size=model.vocab_size, sequence_parallel=False,
        recompute="none", mask_documents=False, seed=0,
    )  # fmt: skip
    places, shapes = stored_tensors(model), {}
    with torch.device("meta"):
        parameters = list(Transformer(specs, streams=streams).parameters())
    for parameter in parameters:
        for box in boxes(parameter.info, places, tensor_rank=0):  # type: ignore[attr-defined]
            shapes[box.name] = box.shape
    return shapes


def _joined(parts: list[Tensor], turn: int) -> Tensor:
    """Parts one below the other, or taking turns every `turn` rows."""
    if len(parts) == 1:
        return parts[0]
    if not turn:
        return torch.cat(parts)
    return torch.stack([part.unflatten(0, (-1, turn)) for part in parts], 1).flatten(0, 2)


def _part(rows: Tensor, place: Stored) -> Tensor:
    if not place.turn:
        return rows.chunk(place.parts)[place.part]
    return rows.unflatten(0, (-1, place.parts, place.turn))[:, place.part].flatten(0, 1)


def _take(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise ValueError(f"{name} is missing from the given weights; is model.family, num_layers or tying another?")
    return tensors[name]


def load_canonical(parameters: Iterable[nn.Parameter], canonical: Mapping[str, Tensor], *, tensor: AxisGroup) -> None:
    """Copy each parameter's part of canonical whole tensors into it. Raises ValueError on a missing or wrong tensor."""
    with torch.no_grad():
        for parameter in parameters:
            info = parameter.info  # type: ignore[attr-defined]
            parameter.copy_(slice_for_rank(from_canonical(canonical, info), info, tensor))


def load_huggingface_state(
    module: nn.Module, state: Mapping[str, Tensor], *, model: ModelConfig, tensor: AxisGroup
) -> None:
    """Load a transformers state dict of whole tensors into a module (any stage, any shard) of this model."""
    load_canonical(module.parameters(), from_huggingface_state(state, model), tensor=tensor)
