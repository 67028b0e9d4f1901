"""Conjugate pairs of collectives over the tensor axis, as autograd functions.

Each function's backward is the collective that its forward's adjoint needs (arXiv:1909.08053, figure 3: f and g;
arXiv:2205.05198, figure 5: g and g-bar along the sequence). None of them does anything on an axis of size 1.

    function                    forward             backward
    copy_to          (f)        identity            all-reduce
    reduce_from      (g)        all-reduce          identity
    scatter_to                  split dim -1        all-gather dim -1
    gather_from                 all-gather dim -1   split dim -1
    scatter_to_sequence         split dim 1         all-gather dim 1
    gather_from_sequence        all-gather dim 1    reduce-scatter dim 1 (or split, see there)
    reduce_scatter_to_sequence  reduce-scatter      all-gather dim 1

Shapes: B micro-batch, S sequence, H hidden, T tensor ranks. Sequence functions take [B, S, H] or [B, S/T, H].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.groups import AxisGroup

SEQUENCE_DIM = 1

# torch 2.13 renamed these two and warns at each call under the old names; older versions know the old names only.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(x: Tensor, tensor: AxisGroup) -> Tensor:
    """Sum over the tensor axis, in place on a contiguous x (else on a copy); no autograd."""
    if tensor.size == 1:
        return x
    x = x.contiguous()
    dist.all_reduce(x, group=tensor.process_group)
    return x


def split(x: Tensor, tensor: AxisGroup, *, dim: int) -> Tensor:
    """This rank's contiguous share of x along dim; no autograd."""
    if tensor.size == 1:
        return x
    assert x.shape[dim] % tensor.size == 0, f"dim {dim} of {tuple(x.shape)} does not divide by {tensor.size}"
    return x.chunk(tensor.size, dim=dim)[tensor.rank].contiguous()


def all_gather(x: Tensor, tensor: AxisGroup, *, dim: int) -> Tensor:
    """All ranks' shares joined along dim; no autograd."""
    if tensor.size == 1:
        return x
    finish, _ = start_all_gather(x, tensor, dim=dim, async_op=False)
    return finish()


def start_all_gather(x: Tensor, tensor: AxisGroup, *, dim: int, async_op: bool = True) -> tuple[Any, Any]:
    """Begin an all-gather along dim. Returns (finish() -> whole tensor, work or None); no autograd."""
    x = x.contiguous()
    shares = x.new_empty((tensor.size, *x.shape))
    work = _all_gather_single(shares.view(-1), x.view(-1), group=tensor.process_group, async_op=async_op)

    def finish() -> Tensor:
        if work is not None:
            work.wait()
        return _join(shares, dim % x.dim())

    return finish, work


def reduce_scatter(x: Tensor, tensor: AxisGroup, *, dim: int) -> Tensor:
    """This rank's share along dim of the sum over ranks; no autograd."""
    if tensor.size == 1:
        return x
    finish, _ = start_reduce_scatter(x, tensor, dim=dim, async_op=False)
    return finish()


def start_reduce_scatter(x: Tensor, tensor: AxisGroup, *, dim: int, async_op: bool = True) -> tuple[Any, Any]:
    """Begin a reduce-scatter along dim. Returns (finish() -> this rank's share, work or None); no autograd."""
    dim = dim % x.dim()
    assert x.shape[dim] % tensor.size == 0, f"dim {dim} of {tuple(x.shape)} does not divide by {tensor.size}"
    shares = torch.stack(x.chunk(tensor.size, dim=dim)) if (dim and x.shape[0] > 1) or dim > 1 else x.contiguous()
    share_shape = list(x.shape)
    share_shape[dim] //= tensor.size
    mine = x.new_empty(share_shape)
    work = _reduce_scatter_single(mine.view(-1), shares.view(-1), group=tensor.process_group, async_op=async_op)

    def finish() -> Tensor:
        if work is not None:
            work.wait()
        assert shares is not None  # keeps the send buffer alive until the collective has ended
        return mine

    return finish, work


def _join(shares: Tensor, dim: int) -> Tensor:
    """[T, ...] shares joined along dim of the rest; a view where all dims before it are 1."""
    size, *rest = shares.shape
    rest[dim] *= size
    return shares.movedim(0, dim).reshape(rest)


def sum_copies(x: Tensor, tensor: AxisGroup, *, parts: int) -> Tensor:
    """The sum of x over the neighbouring tensor ranks that hold one of `parts` parts; no autograd.

    Each rank puts its x in its part's slot and the whole is all-reduced over the tensor axis, so no process group is
    needed for each subset of ranks.
    """
    part = tensor.rank // (tensor.size // parts)
    slots = x.new_zeros((parts, *x.shape))
    slots[part] = x
    return all_reduce(slots, tensor)[part].clone()


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: AxisGroup, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.tensor = tensor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        # A copy: the incoming gradient may be shared with another branch of the graph.
        return None, all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.tensor)


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: AxisGroup, x: Tensor) -> Tensor:  # type: ignore[override]
        return all_reduce(x.clone(memory_format=torch.contiguous_format), tensor)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return None, grad


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: AxisGroup, dim: int, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.tensor, ctx.dim = tensor, dim
        return split(x, tensor, dim=dim)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return None, None, all_gather(grad, ctx.tensor, dim=ctx.dim)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: AxisGroup, dim: int, sum_gradients: bool, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.tensor, ctx.dim, ctx.sum_gradients = tensor, dim, sum_gradients
        return all_gather(x, tensor, dim=dim)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        adjoint = reduce_scatter if ctx.sum_gradients else split
        return None, None, None, adjoint(grad, ctx.tensor, dim=ctx.dim)


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: AxisGroup, dim: int, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.tensor, ctx.dim = tensor, dim
        return reduce_scatter(x, tensor, dim=dim)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return None, None, all_gather(grad, ctx.tensor, dim=ctx.dim)


class _AddOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: AxisGroup, partial: Tensor, term: Tensor) -> Tensor:  # type: ignore[override]
        return partial + term if tensor.rank == 0 else partial.view_as(partial)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return None, grad, grad


def copy_to(x: Tensor, tensor: AxisGroup) -> Tensor:
    """f: x enters a sharded region. Also the sum of a replicated parameter's gradient over the tensor axis."""
    return x if tensor.size == 1 else _CopyTo.apply(tensor, x)


class _CopyOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: AxisGroup, parts: int, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.tensor, ctx.parts = tensor, parts
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return None, None, sum_copies(grad, ctx.tensor, parts=ctx.parts)


def copy_of(x: Tensor, tensor: AxisGroup, *, parts: int) -> Tensor:
    """x is one of `parts` shards, each copied on neighbouring ranks: its gradient is summed over its copies."""
    return x if parts == tensor.size else _CopyOf.apply(tensor, parts, x)


def reduce_from(x: Tensor, tensor: AxisGroup) -> Tensor:
    """g: partial sums leave a sharded region as one replicated tensor."""
    return x if tensor.size == 1 else _ReduceFrom.apply(tensor, x)


def scatter_to(x: Tensor, tensor: AxisGroup) -> Tensor:
    """[..., H] replicated -> this rank's [..., H/T]."""
    return x if tensor.size == 1 else _Scatter.apply(tensor, -1, x)


def gather_from(x: Tensor, tensor: AxisGroup) -> Tensor:
    """[..., H/T] -> [..., H], replicated; what follows is computed alike on all ranks."""
    return x if tensor.size == 1 else _Gather.apply(tensor, -1, False, x)


def scatter_to_sequence(x: Tensor, tensor: AxisGroup) -> Tensor:
    """[B, S, H] replicated -> this rank's [B, S/T, H]."""
    return x if tensor.size == 1 else _Scatter.apply(tensor, SEQUENCE_DIM, x)


def gather_from_sequence(x: Tensor, tensor: AxisGroup, *, sum_gradients: bool = True) -> Tensor:
    """[B, S/T, H] -> [B, S, H].

    `sum_gradients`: what follows is sharded, so the ranks' gradients differ and are summed (reduce-scatter); False
    where what follows is computed alike on all ranks (split).
    """
    return x if tensor.size == 1 else _Gather.apply(tensor, SEQUENCE_DIM, sum_gradients, x)


def reduce_scatter_to_sequence(x: Tensor, tensor: AxisGroup) -> Tensor:
    """Partial sums [B, S, H] -> this rank's [B, S/T, H] of their sum."""
    return x if tensor.size == 1 else _ReduceScatter.apply(tensor, SEQUENCE_DIM, x)


def add_once(partial: Tensor, term: Tensor, tensor: AxisGroup) -> Tensor:
    """Add a replicated term to partial sums that a reduction over the tensor axis will join.

    Rank 0 alone adds it. The reduction's backward hands every rank the whole gradient, so the term's gradient is whole
    on every rank, with or without sequence parallelism, at no communication.
    """
    return partial + term if tensor.size == 1 else _AddOnce.apply(tensor, partial, term)
