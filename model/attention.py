"""Self-attention, causal or in both directions (BERT), and what the attention layers of a stage share.

Heads are split over the tensor axis.

Multi-head, grouped-query (arXiv:2305.13245) and multi-query attention through torch's scaled_dot_product_attention
(flash kernels where they exist), or `model.blocked_attention` on a CPU in fp32. Packed documents are masked apart, and
what lies before a sliding window (arXiv:2310.06825). What depends on positions only (masks, cosines and sines) is an
`AttentionContext`: made once for a micro-batch on a stage, not in each block.

Shapes: B micro-batch, S sequence, H hidden, N query heads, K key-value heads, D head size; per rank N/T and
max(1, K/T) heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.schema import ModelConfig
from model.blocked_attention import QueryBlock, blocked_attention, plan_blocks, plan_whole_blocks
from model.norm import RMSNorm
from model.rotary import Rotary, rotate_and_split
from model.tensor_parallel.linear import RowParallelLinear
from model.tensor_parallel.qkv import QKVParallelLinear
from model.tensor_parallel.random import RandomStreams
from parallel.groups import AxisGroup
from parallel.sizes import sizes

if TYPE_CHECKING:
    from model.kv_cache import CacheStep


@dataclass(frozen=True)
class Visible:
    """Which keys each query sees: `blocks`, the plan of `model.blocked_attention`; None: scaled_dot_product_attention
    with `mask` [B or 1, 1, S, S] added to the scores (None: what is before it where `causal`, else all).
    """

    blocks: tuple[QueryBlock, ...] | None
    mask: Tensor | None
    causal: bool = True


@dataclass(frozen=True)
class AttentionContext:
    """What the blocks of a stage share for one micro-batch: `visible` by sliding window, `cos` and `sin` of Rotary
    (None: learned positions). `cache`: of keys and values, in generation.
    """

    visible: Mapping[int | None, Visible]
    cos: Tensor | None
    sin: Tensor | None
    cache: CacheStep | None = None

    def seen(self, window: int | None, length: int) -> Visible:
        """For a block with this window (None: none) over so many keys."""
        return self.visible[None if window is None or window >= length else window]


def attention_context(
    length: int,
    positions_BS: Tensor | None,
    *,
    windows: Iterable[int | None],
    rotary: Rotary | None,
    blocked: bool,
    device: torch.device,
    dtype: torch.dtype,
    causal: bool = True,
) -> AttentionContext:
    """The context of one micro-batch. `positions_BS` restart at 0 with each document; None: one document, from 0.

    `windows`: of all blocks of the model. Where one hides something, every block gets a mask. Not `causal`: a query
    sees its whole document, and there are no windows.
    """
    if positions_BS is not None and device.type == "cpu" and _one_document(positions_BS):
        positions_BS = None  # on an accelerator the question would make the host wait
    starts_BS = None if positions_BS is None else document_starts(positions_BS)
    cos, sin = (None, None) if rotary is None else rotary(length, positions_BS, device=device, dtype=dtype)
    if not causal:
        return AttentionContext({None: document_keys(length, starts_BS, blocked=blocked, dtype=dtype)}, cos, sin)
    kinds = {None if window is None or window >= length else window for window in windows}
    visible = {}
    for window in kinds:
        lowest = lowest_keys(length, starts_BS, window, always=kinds != {None}, device=device)
        if blocked:
            visible[window] = Visible(plan_blocks(length, lowest, dtype=dtype), None)
        else:
            visible[window] = Visible(None, None if lowest is None else key_mask(lowest, dtype=dtype))
    return AttentionContext(visible, cos, sin)


def document_keys(length: int, starts_BS: Tensor | None, *, blocked: bool, dtype: torch.dtype) -> Visible:
    """Every query sees its whole document. `starts_BS`: as `document_starts`; None: one document."""
    ends_BS = None if starts_BS is None else document_ends(starts_BS)
    if blocked:
        return Visible(plan_whole_blocks(length, starts_BS, ends_BS, dtype=dtype), None, causal=False)
    if starts_BS is None or ends_BS is None:
        return Visible(None, None, causal=False)
    index_S = torch.arange(length, device=starts_BS.device)
    hidden_BSS = (index_S < starts_BS[:, :, None]) | (index_S >= ends_BS[:, :, None])
    mask_BSS = torch.zeros(hidden_BSS.shape, dtype=dtype, device=starts_BS.device)
    return Visible(None, mask_BSS.masked_fill_(hidden_BSS, -torch.inf).unsqueeze(1), causal=False)


def _one_document(positions_BS: Tensor) -> bool:
    """Whether every sample is one document from its first token on."""
    return bool((positions_BS == torch.arange(positions_BS.shape[1])).all())


def document_starts(positions_BS: Tensor) -> Tensor:
    """[B, S] index in the sample of the first token of each token's document; a sample may begin inside a document."""
    index_S = torch.arange(positions_BS.shape[1], device=positions_BS.device)
    return torch.where(positions_BS == 0, index_S, 0).cummax(1).values


def document_ends(starts_BS: Tensor) -> Tensor:
    """[B, S] index in the sample just past the last token of each token's document."""
    length = starts_BS.shape[1]
    index_S = torch.arange(length, device=starts_BS.device)
    last_BS = torch.ones_like(starts_BS, dtype=torch.bool)
    last_BS[:, :-1] = starts_BS[:, 1:] != starts_BS[:, :-1]
    return torch.where(last_BS, index_S + 1, length).flip(1).cummin(1).values.flip(1)


def lowest_keys(
    length: int, starts_BS: Tensor | None, window: int | None, *, always: bool, device: torch.device
) -> Tensor | None:
    """[B or 1, S] index of the first key that each query sees: of its document, and of its window's last `window` keys.

    None: 0 for all, unless a tensor is wanted `always`.
    """
    if window is None:
        return torch.zeros((1, length), dtype=torch.int64, device=device) if starts_BS is None and always else starts_BS
    of_window_S = torch.arange(length, device=device).sub_(window - 1).clamp_(min=0)
    return of_window_S[None] if starts_BS is None else torch.maximum(starts_BS, of_window_S)


def key_mask(lowest_BS: Tensor, *, dtype: torch.dtype) -> Tensor:
    """[B, 1, S, S] of 0 where query i sees key j (i's lowest key <= j <= i) and -inf elsewhere."""
    index_S = torch.arange(lowest_BS.shape[1], device=lowest_BS.device)
    hidden_BSS = (index_S < lowest_BS[:, :, None]) | (index_S > index_S[:, None])
    mask_BSS = torch.zeros(hidden_BSS.shape, dtype=dtype, device=lowest_BS.device)
    return mask_BSS.masked_fill_(hidden_BSS, -torch.inf).unsqueeze(1)


class Attention(nn.Module):
    """Split: heads. Communication: that of a column-parallel QKV and a row-parallel output projection.

    hidden [B, S, H] (sequence parallel: [B, S/T, H]) -> [B, S, H].  softmax(q k^T / sqrt(D) + mask) v, then W_out.
    Qwen3 norms q and k by head before rotation. `window`: keys that a query sees, its own included.
    `recompute_core`: selective recomputation (arXiv:2205.05198 section 5): what lies between the two matrix products is
    not kept but computed again in backward.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        name: str,
        tensor: AxisGroup,
        streams: RandomStreams,
        sequence_parallel: bool,
        recompute_core: bool,
        seed: int,
        window: int | None = None,
    ) -> None:
        super().__init__()
        shape, self.window = sizes(model), window
        self.streams, self.recompute_core = streams, recompute_core
        self.head_dim, self.dropout = shape.head_dim, model.attention_dropout
        self.query_heads = model.num_attention_heads // tensor.size
        self.key_value_heads = max(1, shape.num_key_value_heads // tensor.size)
        self.qkv = QKVParallelLinear(
            model.hidden_size,
            query_heads=model.num_attention_heads,
            key_value_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            name=name,
            tensor=tensor,
            sequence_parallel=sequence_parallel,
            bias=shape.parts.qkv_bias,
            seed=seed,
            std=model.init_std,
        )
        self.query_norm: RMSNorm | None = None
        self.key_norm: RMSNorm | None = None
        if shape.parts.qk_norm:
            # Each rank norms its own heads, as under sequence parallelism its own tokens: gradients are summed over it.
            norm = partial(RMSNorm, shape.head_dim, epsilon=model.norm_epsilon, tensor=tensor, sequence_parallel=True)
            self.query_norm, self.key_norm = norm(name=f"{name}.query_norm"), norm(name=f"{name}.key_norm")
        self.out = RowParallelLinear(
            model.num_attention_heads * shape.head_dim,
            model.hidden_size,
            name=f"{name}.out",
            tensor=tensor,
            sequence_parallel=sequence_parallel,
            bias=shape.parts.out_bias,
            seed=seed,
            std=shape.residual_std,
        )

    def forward(self, hidden_BSH: Tensor, context: AttentionContext) -> Tensor:
        qkv = self.qkv(hidden_BSH)
        core = partial(self.streams.checkpoint, self._core) if self.recompute_core else self._core
        with self.streams.sharded() if self.dropout and self.training else nullcontext():
            out = core(qkv, context)
        return self.out(out)

    def _core(self, qkv: Tensor, context: AttentionContext) -> Tensor:
        """[B, S, (N + 2 K)/T * D] -> [B, S, N/T * D]."""
        batch, length, _ = qkv.shape
        heads = self.query_heads, self.key_value_heads
        qkv_BSND = qkv.view(batch, length, heads[0] + 2 * heads[1], self.head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            q, k, v = qkv_BSND.split([heads[0], heads[1], heads[1]], dim=2)
            qkv_BSND = torch.cat([self.query_norm(q), self.key_norm(k), v], dim=2)
        if context.cos is not None and context.sin is not None:
            q, k, v = rotate_and_split(
                qkv_BSND, context.cos, context.sin, query_heads=heads[0], key_value_heads=heads[1]
            )
        else:
            q, k, v = qkv_BSND.transpose(1, 2).split([heads[0], heads[1], heads[1]], dim=1)
        if context.cache is not None:
            k, v = context.cache.joined(self, k, v)
        seen = context.seen(self.window, k.shape[2])
        if seen.blocks is not None:
            out_BSND = blocked_attention(q.contiguous(), k.contiguous(), v.contiguous(), blocks=seen.blocks)
            return out_BSND.view(batch, length, -1)
        out_BNSD = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=seen.mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=seen.mask is None and seen.causal,
            enable_gqa=heads[0] != heads[1],
        )
        return out_BNSD.transpose(1, 2).reshape(batch, length, -1)
