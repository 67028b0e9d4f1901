"""Attention for CPUs in blocks of queries, with packed documents, made of torch's own matrix products.

The algorithm is FlashAttention's (arXiv:2205.14135, arXiv:2307.08691) with whole rows of keys in place of key tiles: a
block of queries sees only the keys from the first document it belongs to up to its own end (in both directions: to the
last document's end), so neither the upper triangle nor other documents cost anything; backward recomputes the
probabilities from the kept log-sum-exp. On a CPU in fp32 this ran faster than torch's flash kernel, whose inner
products do not reach the rate of the matrix library.
Not for accelerators, low precision or attention dropout: scaled_dot_product_attention serves those.

Shapes: B micro-batch, S sequence, N query heads, K key-value heads, G = N/K, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

QUERIES_PER_BLOCK = 64  # fastest of 64, 128, 256 at S = 512, D = 64: the scores of one block stay in cache


@dataclass(frozen=True)
class QueryBlock:
    """Queries [first, last) see keys [low, stop) but where `mask` [B or 1, 1, 1, queries, masked keys] is -inf.

    The mask covers the last keys only: those before it are all visible. None: all are.
    """

    first: int
    last: int
    low: int
    stop: int
    mask: Tensor | None


def plan_blocks(length: int, starts_BS: Tensor | None, *, dtype: torch.dtype) -> tuple[QueryBlock, ...]:
    """The blocks of one micro-batch. `starts_BS`: index of the first token of each token's document (None: 0)."""
    causal = torch.full((QUERIES_PER_BLOCK, QUERIES_PER_BLOCK), -torch.inf, dtype=dtype).triu_(1)[None, None, None]
    blocks = []
    for first in range(0, length, QUERIES_PER_BLOCK):
        last = min(first + QUERIES_PER_BLOCK, length)
        low, mask = 0, causal[..., : last - first, : last - first]
        if starts_BS is not None:
            mine = starts_BS[:, first:last]
            low = int(mine.min())
            if int(mine.max()) > low:
                keys = torch.arange(low, last)
                hidden = (keys < mine[..., None]) | (keys > torch.arange(first, last)[:, None])
                mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)[:, None, None]
        blocks.append(QueryBlock(first, last, low, last, mask))
    return tuple(blocks)


def plan_whole_blocks(
    length: int, starts_BS: Tensor | None, ends_BS: Tensor | None, *, dtype: torch.dtype
) -> tuple[QueryBlock, ...]:
    """The blocks of one micro-batch whose queries see their document's keys [start, end) in both directions.

    `starts_BS`, `ends_BS` (None: one document): of each token's document.
    """
    blocks = []
    for first in range(0, length, QUERIES_PER_BLOCK):
        last = min(first + QUERIES_PER_BLOCK, length)
        low, stop, mask = 0, length, None
        if starts_BS is not None and ends_BS is not None:
            starts, ends = starts_BS[:, first:last], ends_BS[:, first:last]
            low, stop = int(starts.min()), int(ends.max())
            if int(starts.max()) > low or int(ends.min()) < stop:
                keys = torch.arange(low, stop)
                hidden = (keys < starts[..., None]) | (keys >= ends[..., None])
                mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)[:, None, None]
        blocks.append(QueryBlock(first, last, low, stop, mask))
    return tuple(blocks)


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, blocks: tuple[QueryBlock, ...]):  # type: ignore[override]
        batch, heads, length, size = q.shape
        out = q.new_empty((batch, length, heads, size))
        log_sums = []
        for block in blocks:
            k_block, v_block = _keys(k, block), _keys(v, block)
            scores = _scores(_scaled(q, k, block), k_block, block, batch)
            largest = scores.amax(-1, keepdim=True)
            sums = scores.sub_(largest).exp_().sum(-1, keepdim=True)
            mixed = torch.bmm(scores, v_block)
            rows = out[:, block.first : block.last].transpose(1, 2)
            torch.div(mixed.view(rows.shape), sums.view(*rows.shape[:-1], 1), out=rows)
            log_sums.append(largest.add_(sums.log_()))
        ctx.save_for_backward(q, k, v, out, *log_sums)
        ctx.blocks = blocks
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        q, k, v, out, *log_sums = ctx.saved_tensors
        batch = q.shape[0]
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        grad, out = grad.transpose(1, 2), out.transpose(1, 2)
        for block, log_sum in zip(ctx.blocks, log_sums, strict=True):
            q_block, k_block, v_block = _scaled(q, k, block), _keys(k, block), _keys(v, block)
            grad_block = _rows(grad, k, block)
            mean = (grad_block * _rows(out, k, block)).sum(-1, keepdim=True)
            probabilities = _scores(q_block, k_block, block, batch).sub_(log_sum).exp_()
            _keys(grad_v, block).baddbmm_(probabilities.transpose(1, 2), grad_block)
            grad_scores = torch.bmm(grad_block, v_block.transpose(1, 2)).sub_(mean).mul_(probabilities)
            rows = grad_q[:, :, block.first : block.last]
            torch.mul(torch.bmm(grad_scores, k_block).view(rows.shape), q.shape[-1] ** -0.5, out=rows)
            _keys(grad_k, block).baddbmm_(grad_scores.transpose(1, 2), q_block)
        return grad_q, grad_k, grad_v, None


def _rows(x: Tensor, k: Tensor, block: QueryBlock) -> Tensor:
    """The block's queries [B, N, S, D] -> [B K, G queries, D]: heads that share keys side by side."""
    return x[:, :, block.first : block.last].reshape(k.shape[0] * k.shape[1], -1, x.shape[-1])


def _scaled(q: Tensor, k: Tensor, block: QueryBlock) -> Tensor:
    """The block's queries over sqrt(D), as `_rows`."""
    return (q[:, :, block.first : block.last] * q.shape[-1] ** -0.5).view(k.shape[0] * k.shape[1], -1, q.shape[-1])


def _keys(x: Tensor, block: QueryBlock) -> Tensor:
    """The block's keys or values [B, K, S, D] (contiguous) -> [B K, keys, D], a view."""
    return x.view(-1, *x.shape[2:])[:, block.low : block.stop]


def _scores(q_block: Tensor, k_block: Tensor, block: QueryBlock, batch: int) -> Tensor:
    """Masked scores of scaled queries, [B K, G queries, keys]."""
    scores = torch.bmm(q_block, k_block.transpose(1, 2))
    if block.mask is None:
        return scores
    queries, masked = block.mask.shape[-2:]
    scores.view(batch, k_block.shape[0] // batch, -1, queries, scores.shape[-1])[..., -masked:].add_(block.mask)
    return scores


def blocked_attention(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, blocks: tuple[QueryBlock, ...]) -> Tensor:
    """softmax(q k^T / sqrt(D) + mask) v -> [B, S, N, D]; contiguous fp32 or fp64 inputs, `blocks` of `plan_blocks`."""
    return _BlockedAttention.apply(q_BNSD, k_BKSD, v_BKSD, blocks)
