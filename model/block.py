"""One pre-norm block: hidden + attention(norm(hidden)), then hidden + mlp(norm(hidden)).

With a parallel residual (GPT-J, GPT-NeoX): hidden + attention(norm(hidden)) + mlp(other norm(hidden)). Post-norm (BERT,
arXiv:1909.08053 figure 7 a): norm(hidden + attention(hidden)), then norm(hidden + mlp(hidden)). All families are this
one block with the parts of `parallel.architecture`. Two all-reduces forward and two backward over the tensor axis,
or as many reduce-scatters and all-gathers.

Shapes: B micro-batch, S sequence, H hidden, T tensor ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.schema import ModelConfig
from model.attention import Attention, AttentionContext, attention_context
from model.mlp import MLP
from model.norm import LayerNorm, RMSNorm
from model.rotary import Rotary
from model.tensor_parallel.random import RandomStreams
from parallel.architecture import architecture, windows
from parallel.groups import AxisGroup


class Block(nn.Module):
    """hidden [B, S, H] (sequence parallel: [B, S/T, H]) -> same shape; or (hidden, positions [B, S]) -> the same pair.

    Blocks of one stage share what depends on positions only: `model.layers.run_layers` makes the context with the first
    block and hands it to all. A block called without one makes its own.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        name: str,
        tensor: AxisGroup,
        streams: RandomStreams,
        rotary: Rotary | None,
        sequence_parallel: bool,
        recompute_core: bool,
        seed: int,
        layer: int = 0,
    ) -> None:
        """`layer`: its place among the blocks, from 0, where they have different sliding windows."""
        super().__init__()
        self.windows = windows(model)
        self.parts = architecture(model)
        self.tensor, self.streams, self.rotary = tensor, streams, rotary
        self.sequence_parallel = sequence_parallel and tensor.size > 1
        self.dropout = model.hidden_dropout
        self.attention_norm = build_norm(
            model, name=f"{name}.attention_norm", tensor=tensor, sequence_parallel=sequence_parallel
        )
        self.attention = Attention(
            model,
            name=f"{name}.attention",
            tensor=tensor,
            streams=streams,
            sequence_parallel=sequence_parallel,
            recompute_core=recompute_core,
            seed=seed,
            window=self.windows[layer],
        )
        self.mlp_norm = build_norm(model, name=f"{name}.mlp_norm", tensor=tensor, sequence_parallel=sequence_parallel)
        self.mlp = MLP(model, name=f"{name}.mlp", tensor=tensor, sequence_parallel=sequence_parallel, seed=seed)

    def forward(self, x: Any, context: AttentionContext | None = None) -> Any:
        hidden_BSH, positions_BS = x if isinstance(x, tuple) else (x, None)
        if context is None:
            context = self.context(hidden_BSH, positions_BS)
        if self.parts.post_norm:
            hidden_BSH = self.attention_norm(self._add(hidden_BSH, self.attention(hidden_BSH, context)))
            hidden_BSH = self.mlp_norm(self._add(hidden_BSH, self.mlp(hidden_BSH)))
        else:
            added_BSH = self._add(hidden_BSH, self.attention(self.attention_norm(hidden_BSH), context))
            read_BSH = hidden_BSH if self.parts.parallel_residual else added_BSH
            hidden_BSH = self._add(added_BSH, self.mlp(self.mlp_norm(read_BSH)))
        return (hidden_BSH, positions_BS) if isinstance(x, tuple) else hidden_BSH

    def context(self, hidden_BSH: Tensor, positions_BS: Tensor | None) -> AttentionContext:
        """What this block, and any other block of the model, needs to know of the micro-batch's positions."""
        length = hidden_BSH.shape[1] * (self.tensor.size if self.sequence_parallel else 1)
        device, dtype = hidden_BSH.device, hidden_BSH.dtype
        dropout = self.training and self.attention.dropout > 0
        blocked = device.type == "cpu" and dtype in (torch.float32, torch.float64) and not dropout
        return attention_context(
            length, positions_BS, windows=self.windows, rotary=self.rotary, blocked=blocked, device=device, dtype=dtype,
            causal=self.parts.causal,
        )  # fmt: skip

    def _add(self, hidden_BSH: Tensor, branch_BSH: Tensor) -> Tensor:
        branch_BSH = hidden_dropout(
            branch_BSH, self.dropout, training=self.training, streams=self.streams, sharded=self.sequence_parallel
        )
        return hidden_BSH + branch_BSH


def build_norm(model: ModelConfig, *, name: str, tensor: AxisGroup, sequence_parallel: bool) -> LayerNorm | RMSNorm:
    """The family's norm."""
    kind = LayerNorm if architecture(model).layer_norm else RMSNorm
    return kind(
        model.hidden_size,
        epsilon=model.norm_epsilon,
        name=name,
        tensor=tensor,
        sequence_parallel=sequence_parallel,
    )


def hidden_dropout(x: Tensor, probability: float, *, training: bool, streams: RandomStreams, sharded: bool) -> Tensor:
    """Dropout with one mask on all tensor ranks, or, where x is a share of the sequence, with each rank's own."""
    if not probability or not training:
        return x
    if sharded:
        with streams.sharded():
            return F.dropout(x, probability)
    return F.dropout(x, probability)
