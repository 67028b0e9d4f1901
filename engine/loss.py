"""The training loss: mean over the unmasked tokens of the *global* batch.

DeepSpeed averages losses over micro-batches and then over data ranks; with unequal numbers of unmasked tokens that
is another number and another gradient. So each micro-batch's sum of token losses is multiplied by

    scale = num_micro_batches * data_parallel_size / unmasked tokens of the global batch

and DeepSpeed's two means turn it into the sum over all token losses divided by all unmasked tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed

from corpus.batches import IGNORED, Batch
from model.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from parallel.groups import AxisGroup


class TokenLoss:
    """loss_fn(logits, (labels, scale)): logits [B, S, V/T], labels [B, S], scale [] -> []."""

    def __init__(self, *, tensor: AxisGroup, vocab_size: int):
        self.tensor = tensor
        self.vocab_size = vocab_size

    def __call__(self, logits_BSV: torch.Tensor, labels: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        labels_BS, scale = labels
        losses_BS = vocab_parallel_cross_entropy(logits_BSV, labels_BS, tensor=self.tensor, vocab_size=self.vocab_size)
        return losses_BS.sum() * scale


def count_unmasked(batches: Sequence[Batch], *, data: AxisGroup, device: torch.device) -> int:
    """Unmasked tokens of the global batch (one all-reduce of a number over the data axis)."""
    counts = [(batch.labels_BS != IGNORED).sum() for batch in batches]
    count = torch.stack(counts).sum().to(device) if counts else torch.zeros((), dtype=torch.int64, device=device)
    if data.size > 1:
        torch.distributed.all_reduce(count, group=data.process_group)
    return int(count)


def loss_scale(unmasked: int, *, num_micro_batches: int, data: AxisGroup) -> torch.Tensor:
    """The factor above; a batch without any unmasked token has loss 0."""
    return torch.tensor(num_micro_batches * data.size / max(unmasked, 1), dtype=torch.float32)
