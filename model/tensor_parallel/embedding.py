"""VocabParallelEmbedding: the word table split over the tensor axis by rows, and its use as the output head.

Source: arXiv:1909.08053 section 3. Not here: positions and dropout (`model.embedding`) nor the loss
(`model.tensor_parallel.cross_entropy`).

Shapes: B micro-batch, S sequence, H hidden, V padded vocabulary, T tensor ranks.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from model.tensor_parallel.init import normal_parameter
from model.tensor_parallel.linear import column_parallel_linear
from model.tensor_parallel.parameter import describe
from parallel.groups import AxisGroup


class VocabParallelEmbedding(nn.Module):
    """Split: the vocabulary. Rank t holds rows [t V/T, (t+1) V/T); rows from `vocab_size` on are padding.

    Per rank: weight [V/T, H]; tokens [B, S] -> *partial* hidden [B, S, H], zeros where the token is another rank's: the
    caller reduces (all-reduce or reduce-scatter), after adding what is replicated. Backward: none.
    With `project=True`: hidden [B, S, H] (or [B, S/T, H]) -> logits [B, S, V/T], as ColumnParallelLinear (tied head),
    with `bias` [V/T].
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        padded_vocab_size: int,
        name: str,
        tensor: AxisGroup,
        sequence_parallel: bool,
        seed: int,
        std: float,
    ) -> None:
        super().__init__()
        self.tensor, self.sequence_parallel = tensor, sequence_parallel
        info = describe(
            f"{name}.weight", (padded_vocab_size, hidden_size), tensor=tensor, shard_dim=0, real_rows=vocab_size
        )
        self.rows = info.local_shape[0]
        self.first = tensor.rank * self.rows
        self.weight = normal_parameter(info, tensor=tensor, seed=seed, std=std)

    def forward(self, x: Tensor, project: bool = False, bias: Tensor | None = None) -> Tensor:
        if project:
            return column_parallel_linear(
                x, self.weight, bias, tensor=self.tensor, sequence_parallel=self.sequence_parallel
            )
        if self.tensor.size == 1:
            return F.embedding(x, self.weight)
        local_BS = x - self.first
        elsewhere_BS = (local_BS < 0) | (local_BS >= self.rows)
        partial_BSH = F.embedding(local_BS.masked_fill_(elsewhere_BS, 0), self.weight)
        return partial_BSH.masked_fill_(elsewhere_BS.unsqueeze(-1), 0.0)
