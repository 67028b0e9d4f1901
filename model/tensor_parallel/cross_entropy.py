"""Cross-entropy over a vocabulary split on the tensor axis; the logits are never gathered.

Source: arXiv:1909.08053 section 3. Three numbers a token cross the wire: the largest logit, then the sum of
exponentials and the target's logit together. Backward needs no communication and writes the gradient into the buffer
that forward kept, so the loss holds one buffer of the logits' size, or none beside the logits.

Shapes: B micro-batch, S sequence, V padded vocabulary, T tensor ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.groups import AxisGroup

IGNORED_LABEL = -100


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, tensor: AxisGroup, vocab_size: int, overwrite: bool):  # type: ignore[override]
        width = logits.shape[-1]
        first = tensor.rank * width
        real = min(max(vocab_size - first, 0), width)  # columns that are not padding
        flat, labels = logits.detach().reshape(-1, width), labels.reshape(-1)
        dtype = torch.promote_types(flat.dtype, torch.float32)
        exponentials = flat if overwrite and flat.dtype == dtype else torch.empty_like(flat, dtype=dtype)

        if real:
            largest = flat[:, :real].amax(-1).to(dtype)
        else:
            largest = exponentials.new_full((flat.shape[0],), -torch.inf)
        if tensor.size > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tensor.process_group)
        shifted = torch.sub(flat[:, :real], largest[:, None], out=exponentials[:, :real])
        exponentials[:, real:] = 0.0

        ignored = labels == IGNORED_LABEL
        local = labels - first
        elsewhere = (local < 0) | (local >= real) | ignored
        local = local.masked_fill(elsewhere, 0)
        sums = exponentials.new_zeros((2, flat.shape[0]))
        if real:
            sums[0] = torch.gather(shifted, 1, local[:, None]).squeeze(1).masked_fill_(elsewhere, 0.0)
            torch.sum(shifted.exp_(), -1, out=sums[1])
        if tensor.size > 1:
            dist.all_reduce(sums, group=tensor.process_group)
        losses = torch.log(sums[1]).sub_(sums[0]).masked_fill_(ignored, 0.0)
        ctx.save_for_backward(exponentials, sums[1], local, elsewhere, ignored)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return losses.view(logits.shape[:-1])

    @staticmethod
    def backward(ctx, grad_losses):  # type: ignore[override]
        exponentials, sums, local, elsewhere, ignored = ctx.saved_tensors
        # d loss / d logit = softmax - onehot; the kept buffer becomes the gradient (backward runs once).
        scale = grad_losses.reshape(-1).to(exponentials.dtype).masked_fill(ignored, 0.0)
        grad = exponentials.mul_((scale / sums)[:, None])
        grad.scatter_add_(1, local[:, None], scale.neg().masked_fill_(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype).view(ctx.shape), None, None, None, None


def vocab_parallel_cross_entropy(
    logits_BSV: Tensor, labels_BS: Tensor, *, tensor: AxisGroup, vocab_size: int, overwrite_logits: bool = False
) -> Tensor:
    """Token losses [B, S] in fp32 (fp64 logits: fp64), 0 where the label is -100, equal on all tensor ranks.

    `logits_BSV` is this rank's shard [B, S, V/T]; ids from `vocab_size` on are padding and get no probability.
    Backward may run once only: it overwrites what forward kept. `overwrite_logits`: fp32 logits, which the caller must
    not use again, serve as that buffer, so that the loss holds no memory of their size beside them.
    """
    return _VocabParallelCrossEntropy.apply(logits_BSV, labels_BS, tensor, vocab_size, overwrite_logits)
