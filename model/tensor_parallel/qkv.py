"""QKVParallelLinear: query, key and value projections as one column-parallel matrix product, split by heads.

Source: arXiv:1909.08053 section 3 (heads over the tensor axis), arXiv:2305.13245 (grouped key-value heads).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from model.tensor_parallel import collectives
from model.tensor_parallel.init import constant_parameter, normal_parameter
from model.tensor_parallel.linear import column_parallel_linear
from model.tensor_parallel.parameter import describe
from parallel.groups import AxisGroup

if TYPE_CHECKING:
    from model.tensor_parallel.lora import ColumnLora


class QKVParallelLinear(nn.Module):
    """Split: heads. Query, key and value rows of one rank are one matrix.

    Per rank: x [B, S, H] -> [B, S, (q + 2 kv) D] with q = query heads / T and kv = max(1, key-value heads / T) heads of
    size D, in the order query, key, value. Communication as ColumnParallelLinear.
    With fewer key-value heads than tensor ranks, T / key-value heads neighbouring ranks hold equal copies of one head,
    in a parameter of their own (each parameter is wholly sharded, or wholly copied), and the copies' gradients are
    summed in backward.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        query_heads: int,
        key_value_heads: int,
        head_dim: int,
        name: str,
        tensor: AxisGroup,
        sequence_parallel: bool,
        bias: bool,
        seed: int,
        std: float,
    ) -> None:
        super().__init__()
        if query_heads % tensor.size or max(key_value_heads, tensor.size) % min(key_value_heads, tensor.size):
            raise ValueError(
                f"parallel.tp={tensor.size} does not fit model.num_attention_heads={query_heads} with "
                f"num_key_value_heads={key_value_heads}; it must divide the first, and be a divisor or multiple of the "
                "second"
            )
        self.tensor, self.sequence_parallel = tensor, sequence_parallel
        self.parts = min(key_value_heads, tensor.size)  # different key-value shards
        copies = tensor.size // self.parts
        query = (("query", query_heads * head_dim),)
        key_value = (("key", key_value_heads * head_dim), ("value", key_value_heads * head_dim))

        def make(
            label: str, sections: tuple[tuple[str, int], ...], replicas: int
        ) -> tuple[nn.Parameter, nn.Parameter | None]:
            rows = sum(size for _, size in sections)
            split: dict[str, Any] = dict(tensor=tensor, shard_dim=0, sections=sections, replicas=replicas)
            weight = describe(f"{name}.{label}.weight", (rows, hidden_size), **split)
            offset = describe(f"{name}.{label}.bias", (rows,), **split)
            return (
                normal_parameter(weight, tensor=tensor, seed=seed, std=std),
                constant_parameter(offset, tensor=tensor, value=0.0) if bias else None,
            )

        # `weight` holds all three; or the queries only, and `kv_weight` this rank's copy of keys and values.
        self.kv_weight: nn.Parameter | None = None
        self.kv_bias: nn.Parameter | None = None
        if copies == 1:
            self.weight, self.bias = make("qkv", query + key_value, 1)
        else:
            self.weight, self.bias = make("q", query, 1)
            self.kv_weight, self.kv_bias = make("kv", key_value, copies)
        self.lora: ColumnLora | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.kv_weight is not None:
            weight = _JoinCopies.apply(self.tensor, self.parts, weight, self.kv_weight)
        if bias is not None and self.kv_bias is not None:
            bias = _JoinCopies.apply(self.tensor, self.parts, bias, self.kv_bias)
        y = column_parallel_linear(x, weight, bias, tensor=self.tensor, sequence_parallel=self.sequence_parallel)
        return y if self.lora is None else y + self.lora(x)


class _JoinCopies(torch.autograd.Function):
    """Queries' rows over this rank's copy of keys and values; backward sums the latter's gradient over its copies.

    Gradients are tensors of their own: a view would keep the joined one alive until the step.
    """

    @staticmethod
    def forward(ctx, tensor: AxisGroup, parts: int, query: Tensor, key_value: Tensor) -> Tensor:  # type: ignore[override]
        ctx.tensor, ctx.parts, ctx.query_rows = tensor, parts, query.shape[0]
        return torch.cat([query, key_value])

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        query, key_value = grad[: ctx.query_rows].clone(), grad[ctx.query_rows :]
        return None, None, query, collectives.sum_copies(key_value, ctx.tensor, parts=ctx.parts)
