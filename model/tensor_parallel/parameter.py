"""What a parameter is in the whole model: name, whole shape, and which part of it this tensor rank holds.

`ParameterInfo` rides on each parameter as attribute `info`. With it, checkpoints, exports, parity tests and norms need
to know nothing of layers. A whole tensor may be made of named sections along its first dim (fused QKV: query, key and
value; fused gate-up: gate and up), each split over the tensor axis by itself. The *canonical* form of the model is one
whole tensor a section, with real vocabulary rows only: it depends on no plan.

The rule for DeepSpeed's gradient norm: `parameter.tensor_model_parallel` is True exactly where a copy must be counted
on tensor ranks other than 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parallel.groups import AxisGroup


@dataclass(frozen=True)
class Section:
    """A named slice of a whole tensor along dim 0; `size` in rows."""

    name: str
    size: int


@dataclass(frozen=True)
class ParameterInfo:
    """`parts` different shards along `shard_dim` (None: whole on each rank), each on `replicas` neighbouring ranks.

    parts * replicas is the tensor-parallel size. `real_rows`: rows of dim 0 that are not vocabulary padding.
    """

    name: str
    global_shape: tuple[int, ...]
    shard_dim: int | None
    parts: int
    replicas: int
    sections: tuple[Section, ...] = ()
    real_rows: int | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of one rank's part."""
        shape = list(self.global_shape)
        if self.shard_dim is not None:
            shape[self.shard_dim] //= self.parts
        return tuple(shape)

    @property
    def canonical_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and whole shape of each canonical tensor, without vocabulary padding."""
        rows = self.real_rows if self.real_rows is not None else self.global_shape[0]
        sections = self.sections or (Section(self.name, rows),)
        return {section.name: (section.size, *self.global_shape[1:]) for section in sections}

    @property
    def numel(self) -> int:
        """Number of values in the whole model, without vocabulary padding."""
        return sum(math.prod(shape) for shape in self.canonical_shapes.values())


def describe(
    name: str,
    global_shape: tuple[int, ...],
    *,
    tensor: AxisGroup,
    shard_dim: int | None = None,
    sections: Sequence[tuple[str, int]] = (),
    replicas: int = 1,
    real_rows: int | None = None,
) -> ParameterInfo:
    """The info of a parameter split over `tensor`: sections name siblings, e.g. ("query", 64) in "….qkv.weight".

    `replicas`: neighbouring ranks that hold the same part. Raises ValueError where a section does not divide.
    """
    if shard_dim is None:
        return ParameterInfo(name, global_shape, None, 1, tensor.size, _named(name, sections), real_rows)
    parts = tensor.size // replicas
    for size in [size for _, size in sections] or [global_shape[shard_dim]]:
        if size % parts:
            raise ValueError(f"{name}: {size} of shape {global_shape} does not divide over {parts} tensor ranks")
    return ParameterInfo(name, global_shape, shard_dim, parts, replicas, _named(name, sections), real_rows)


def _named(name: str, sections: Sequence[tuple[str, int]]) -> tuple[Section, ...]:
    """("query", 64) of "a.qkv.weight" is Section("a.query.weight", 64)."""
    path, _, leaf = name.rpartition(".")
    parent = path.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    return tuple(Section(f"{prefix}{section}.{leaf}", size) for section, size in sections)


def attach(parameter: nn.Parameter, info: ParameterInfo, tensor: AxisGroup) -> nn.Parameter:
    """Set `info` and `tensor_model_parallel` on the parameter and return it."""
    parameter.info = info  # type: ignore[attr-defined]
    first_copy = tensor.rank % info.replicas == 0
    parameter.tensor_model_parallel = info.shard_dim is not None and first_copy  # type: ignore[attr-defined]
    return parameter


def slice_for_rank(full: Tensor, info: ParameterInfo, tensor: AxisGroup) -> Tensor:
    """This tensor rank's part of a whole tensor [info.global_shape] -> [info.local_shape]."""
    if tuple(full.shape) != info.global_shape:
        raise ValueError(f"{info.name}: whole tensor is {tuple(full.shape)}, the model needs {info.global_shape}")
    if info.shard_dim is None or info.parts == 1:
        return full
    part = tensor.rank // info.replicas
    sizes = [section.size for section in info.sections] or [info.global_shape[info.shard_dim]]
    pieces = [piece.chunk(info.parts, info.shard_dim)[part] for piece in full.split(sizes, info.shard_dim)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, info.shard_dim)


def join_ranks(shards: Sequence[Tensor], info: ParameterInfo) -> Tensor:
    """The whole tensor from every tensor rank's part, in rank order; the inverse of `slice_for_rank`."""
    if info.shard_dim is None or info.parts == 1:
        return shards[0]
    parts = shards[:: info.replicas]
    sizes = [section.size // info.parts for section in info.sections] or [parts[0].shape[info.shard_dim]]
    by_part = [part.split(sizes, info.shard_dim) for part in parts]
    return torch.cat([piece for pieces in zip(*by_part, strict=True) for piece in pieces], info.shard_dim)


def to_canonical(full: Tensor, info: ParameterInfo) -> dict[str, Tensor]:
    """A whole tensor as its canonical tensors: one a section, vocabulary padding cut off. Views where possible."""
    shapes = info.canonical_shapes
    rows = [shape[0] for shape in shapes.values()]
    pieces = full[: sum(rows)].split(rows) if info.real_rows is not None or info.sections else (full,)
    return dict(zip(shapes, pieces, strict=True))


def from_canonical(tensors: Mapping[str, Tensor], info: ParameterInfo) -> Tensor:
    """The whole tensor from canonical ones (padding rows are zeros). Raises ValueError naming what is wrong."""
    pieces = []
    for name, shape in info.canonical_shapes.items():
        if name not in tensors:
            raise ValueError(f"{name} of shape {shape} is missing from the given weights")
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}, the model needs {shape}")
        pieces.append(tensors[name])
    padding = info.global_shape[0] - sum(piece.shape[0] for piece in pieces)
    if padding:
        pieces.append(pieces[0].new_zeros((padding, *info.global_shape[1:])))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def count_parameters(infos: Sequence[ParameterInfo]) -> int:
    """Values of the whole model: each name once (tied copies are one), no vocabulary padding."""
    return sum(info.numel for info in {info.name: info for info in infos}.values())
