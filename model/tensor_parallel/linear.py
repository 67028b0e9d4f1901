"""The two halves of a Megatron block's matrix products: ColumnParallelLinear and RowParallelLinear.

Source: arXiv:1909.08053 section 3 (tensor parallelism) and arXiv:2205.05198 section 4.2 (sequence parallelism). The
collectives live inside one autograd function with the matrix product, so that backward overlaps communication with the
weight-gradient product. On a tensor axis of size 1 both are torch's own linear, unless the engine takes weight
gradients itself (`model.tensor_parallel.weight_gradients`).

Shapes: B micro-batch, S sequence, I inputs, O outputs, T tensor ranks. x is [B, S, I] whole; under sequence parallelism
replicated activations are [B, S/T, .] instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.tensor_parallel import collectives
from model.tensor_parallel.init import constant_parameter, normal_parameter
from model.tensor_parallel.parameter import describe
from model.tensor_parallel.weight_gradients import weight_gradient
from parallel.groups import AxisGroup

if TYPE_CHECKING:
    from model.tensor_parallel.lora import ColumnLora, RowLora


def _bias_gradient(grad: Tensor) -> Tensor:
    return grad.reshape(-1, grad.shape[-1]).sum(0)


class _ColumnParallel(torch.autograd.Function):
    """y = f(x) W^T + b with f copy_to, or gather_from_sequence under sequence parallelism."""

    @staticmethod
    def forward(ctx, x, weight, bias, tensor: AxisGroup, sequence_parallel: bool):  # type: ignore[override]
        ctx.save_for_backward(x, weight)  # under sequence parallelism only the shard is kept, and gathered again
        ctx.tensor, ctx.sequence_parallel, ctx.has_bias = tensor, sequence_parallel, bias is not None
        whole = collectives.all_gather(x, tensor, dim=1) if sequence_parallel else x
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad = grad.contiguous()
        grad_x = grad_weight = finish = work = None
        gather = None
        if ctx.sequence_parallel and needs_weight:
            gather, _ = collectives.start_all_gather(x, ctx.tensor, dim=1)
        if needs_x:
            grad_x = grad.matmul(weight)
            if ctx.sequence_parallel:
                finish, _ = collectives.start_reduce_scatter(grad_x, ctx.tensor, dim=1)
            elif ctx.tensor.size > 1:
                work = torch.distributed.all_reduce(grad_x, group=ctx.tensor.process_group, async_op=True)
        if needs_weight:
            grad_weight = weight_gradient(weight, grad, gather() if gather is not None else x)
        grad_bias = _bias_gradient(grad) if ctx.has_bias and ctx.needs_input_grad[2] else None
        if finish is not None:
            grad_x = finish()
        elif work is not None:
            work.wait()
        return grad_x, grad_weight, grad_bias, None, None


class _RowParallel(torch.autograd.Function):
    """y = g(x W^T) + b with g reduce_from, or reduce_scatter_to_sequence under sequence parallelism.

    Rank 0 adds the bias before the reduction; backward has the whole gradient on every rank (see `add_once`). `more`:
    this rank's part of another sum, reduced with it.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, tensor: AxisGroup, sequence_parallel: bool, more):  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        ctx.tensor, ctx.sequence_parallel, ctx.has_bias = tensor, sequence_parallel, bias is not None
        partial = F.linear(x, weight, bias if tensor.rank == 0 else None)
        if more is not None:
            partial += more
        if sequence_parallel:
            return collectives.reduce_scatter(partial, tensor, dim=1)
        return collectives.all_reduce(partial, tensor)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad = collectives.all_gather(grad, ctx.tensor, dim=1) if ctx.sequence_parallel else grad.contiguous()
        grad_x = grad.matmul(weight) if ctx.needs_input_grad[0] else None
        grad_weight = weight_gradient(weight, grad, x) if ctx.needs_input_grad[1] else None
        grad_bias = _bias_gradient(grad) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, grad if ctx.needs_input_grad[5] else None


def column_parallel_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, tensor: AxisGroup, sequence_parallel: bool
) -> Tensor:
    """x [B, S, I] (or [B, S/T, I]), weight [O/T, I], bias [O/T] -> [B, S, O/T]."""
    if tensor.size == 1 and not hasattr(weight, "weight_gradients"):
        return F.linear(x, weight, bias)
    return _ColumnParallel.apply(x, weight, bias, tensor, sequence_parallel and tensor.size > 1)


def row_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    tensor: AxisGroup,
    sequence_parallel: bool,
    more: Tensor | None = None,
) -> Tensor:
    """x [B, S, I/T], weight [O, I/T], bias [O] replicated -> [B, S, O] (or [B, S/T, O]).

    more [B, S, O]: added to each rank's part before the parts are summed.
    """
    if tensor.size == 1 and not hasattr(weight, "weight_gradients"):
        return F.linear(x, weight, bias) if more is None else F.linear(x, weight, bias) + more
    return _RowParallel.apply(x, weight, bias, tensor, sequence_parallel and tensor.size > 1, more)


class ColumnParallelLinear(nn.Module):
    """Split: the output features, W = [W_1; ...; W_T] by rows, each section by itself.

    Per rank: weight [O/T, I], bias [O/T]; x [B, S, I] -> y [B, S, O/T]. Forward: no communication (sequence parallel:
    all-gather of x [B, S/T, I]). Backward: all-reduce of the input gradient (sequence parallel: reduce-scatter, and x
    is gathered again), overlapped with the weight-gradient product.  y_t = x W_t^T + b_t
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        name: str,
        tensor: AxisGroup,
        sequence_parallel: bool,
        bias: bool,
        seed: int,
        std: float,
        sections: tuple[tuple[str, int], ...] = (),
        real_rows: int | None = None,
    ) -> None:
        super().__init__()
        self.tensor, self.sequence_parallel = tensor, sequence_parallel
        info = describe(
            f"{name}.weight",
            (out_features, in_features),
            tensor=tensor,
            shard_dim=0,
            sections=sections,
            real_rows=real_rows,
        )
        self.weight = normal_parameter(info, tensor=tensor, seed=seed, std=std)
        self.bias: nn.Parameter | None = None
        if bias:
            info = describe(f"{name}.bias", (out_features,), tensor=tensor, shard_dim=0, sections=sections)
            self.bias = constant_parameter(info, tensor=tensor, value=0.0)

        self.lora: ColumnLora | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = column_parallel_linear(
            x, self.weight, self.bias, tensor=self.tensor, sequence_parallel=self.sequence_parallel
        )
        return y if self.lora is None else y + self.lora(x)


class RowParallelLinear(nn.Module):
    """Split: the input features, W = [W_1 ... W_T] by columns.

    Per rank: weight [O, I/T], bias [O] replicated; x [B, S, I/T] -> y [B, S, O]. Forward: all-reduce of y (sequence
    parallel: reduce-scatter to [B, S/T, O]). Backward: none (sequence parallel: all-gather of the output gradient).
    y = sum_t x_t W_t^T + b
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        name: str,
        tensor: AxisGroup,
        sequence_parallel: bool,
        bias: bool,
        seed: int,
        std: float,
    ) -> None:
        super().__init__()
        self.tensor, self.sequence_parallel = tensor, sequence_parallel
        info = describe(f"{name}.weight", (out_features, in_features), tensor=tensor, shard_dim=1)
        self.weight = normal_parameter(info, tensor=tensor, seed=seed, std=std)
        self.bias: nn.Parameter | None = None
        if bias:
            info = describe(f"{name}.bias", (out_features,), tensor=tensor)
            self.bias = constant_parameter(info, tensor=tensor, value=0.0)

        self.lora: RowLora | None = None

    def forward(self, x: Tensor) -> Tensor:
        return row_parallel_linear(
            x,
            self.weight,
            self.bias,
            tensor=self.tensor,
            sequence_parallel=self.sequence_parallel,
            more=None if self.lora is None else self.lora(x),
        )
