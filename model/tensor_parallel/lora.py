"""Low-rank adapters beside the parallel linear layers: y = x W^T + b + alpha / r * dropout(x) A^T B^T, W and b frozen.

Source: arXiv:2106.09685; names, initial values and scaling as in Hugging Face PEFT. B is split as W's rows are and A as
its columns, so an adapter adds no collective of the activations' size: beside a column-parallel weight r numbers a
token are summed in backward, beside a row-parallel one its part joins the layer's own reduction.

Shapes: B micro-batch, S sequence, I inputs, O outputs, R rank, M adapters of one layer, T tensor ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.tensor_parallel import collectives
from model.tensor_parallel.init import constant_parameter, uniform_parameter
from model.tensor_parallel.parameter import describe
from model.tensor_parallel.random import RandomStreams
from parallel.groups import AxisGroup


@dataclass(frozen=True)
class Adapter:
    """Shape and training of an adapter, the same for all of a model."""

    rank: int
    alpha: float
    dropout: float
    seed: int

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a column-parallel weight. name: of their adapter (the module in transformers; None: they have
    none); sections: (label, rows) in the whole weight; copies: neighbouring ranks that hold the same.
    """

    name: str | None
    sections: tuple[tuple[str, int], ...]
    copies: int = 1

    @property
    def size(self) -> int:
        return sum(size for _, size in self.sections)


class _Lora(nn.Module):
    """What both kinds share: dropout on x, one mask on all ranks where x is whole, each rank's own elsewhere; and A."""

    def __init__(self, adapter: Adapter, *, tensor: AxisGroup, streams: RandomStreams, sharded_input: bool) -> None:
        super().__init__()
        self.adapter, self.tensor, self.streams = adapter, tensor, streams
        self.sharded_input = sharded_input and tensor.size > 1

    def dropped(self, x: Tensor) -> Tensor:
        if not self.training or not self.adapter.dropout:
            return x
        with self.streams.sharded() if self.sharded_input else nullcontext():
            return F.dropout(x, self.adapter.dropout)

    def matrix_a(self, name: str, in_features: int, *, shard_dim: int | None) -> nn.Parameter:
        """kaiming_uniform with a = sqrt 5 over the whole matrix's inputs: PEFT's."""
        info = describe(
            f"{name}.lora_A.weight", (self.adapter.rank, in_features), tensor=self.tensor, shard_dim=shard_dim
        )
        return uniform_parameter(info, tensor=self.tensor, seed=self.adapter.seed, bound=in_features**-0.5)


class ColumnLora(_Lora):
    """Split: B by rows, as the weight's sections are; A [R, I] is whole on each rank.

    x [B, S, I] (sequence parallel: [B, S/T, I]) -> [B, S, O/T], what is to be added to the layer's output; zeros where
    rows have no adapter. Backward: all-reduce of the gradient of x A^T [B, S, M R]. Sequence parallel: x A^T is
    gathered (backward: reduce-scattered), and A's gradient, of a share of the tokens on each rank, is summed.
    """

    def __init__(
        self,
        adapter: Adapter,
        rows: Sequence[Rows],
        *,
        in_features: int,
        tensor: AxisGroup,
        sequence_parallel: bool,
        streams: RandomStreams,
    ) -> None:
        super().__init__(adapter, tensor=tensor, streams=streams, sharded_input=sequence_parallel)
        self.rows = tuple(rows)
        self.a, self.b = nn.ParameterList(), nn.ParameterList()
        for run in self.rows:
            if run.name is None:
                continue
            self.a.append(self.matrix_a(run.name, in_features, shard_dim=None))
            several = len(run.sections) > 1
            info = describe(
                f"{run.name}.lora_B.weight",
                (run.size, adapter.rank),
                tensor=tensor,
                shard_dim=0,
                sections=[(f"{label}.lora_B", size) for label, size in run.sections] if several else (),
                replicas=run.copies,
            )
            self.b.append(constant_parameter(info, tensor=tensor, value=0.0))

    def forward(self, x: Tensor) -> Tensor:
        inner = self._inner(x)
        if self.sharded_input:
            inner = collectives.gather_from_sequence(inner, self.tensor)
        else:
            inner = collectives.copy_to(inner, self.tensor)
        chunks, b = iter(inner.split(self.adapter.rank, dim=-1)), iter(self.b)
        return self.adapter.scaling * torch.cat([self._outer(run, chunks, b, inner) for run in self.rows], dim=-1)

    def _inner(self, x: Tensor) -> Tensor:
        """x A^T of all adapters side by side, [B, S, M R] (sequence parallel: [B, S/T, M R])."""
        matrices = [collectives.copy_to(a, self.tensor) if self.sharded_input else a for a in self.a]
        if self.training and self.adapter.dropout:
            return torch.cat([F.linear(self.dropped(x), a) for a in matrices], dim=-1)  # each adapter has its own mask
        return F.linear(x, torch.cat(matrices))

    def _outer(self, run: Rows, chunks, b, inner: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        parts = self.tensor.size // run.copies
        if run.name is None:
            return inner.new_zeros((*inner.shape[:-1], run.size // parts))
        return F.linear(next(chunks), collectives.copy_of(next(b), self.tensor, parts=parts))


class RowLora(_Lora):
    """Split: A by columns, as the weight is; B [O, R] is whole on each rank.

    x [B, S, I/T] -> [B, S, O], this rank's part of the sum that the layer's own reduction makes. Backward: all-reduce
    of B's gradient [O, R], as each rank has seen its own share of x A^T.
    """

    def __init__(
        self,
        adapter: Adapter,
        name: str,
        *,
        in_features: int,
        out_features: int,
        tensor: AxisGroup,
        streams: RandomStreams,
    ) -> None:
        super().__init__(adapter, tensor=tensor, streams=streams, sharded_input=True)
        self.a = self.matrix_a(name, in_features, shard_dim=1)
        info = describe(f"{name}.lora_B.weight", (out_features, adapter.rank), tensor=tensor)
        self.b = constant_parameter(info, tensor=tensor, value=0.0)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.linear(self.dropped(x), self.a)
        return self.adapter.scaling * F.linear(inner, collectives.copy_to(self.b, self.tensor))
