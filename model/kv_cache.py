"""Keys and values of the tokens that were computed already, kept for the tokens that come after.

One pair of buffers a block of this rank, as long as a sequence may get, made once. A key's place in its row is its
position in the sequence, whatever the other rows hold: prompts of unequal length are padded on the right, what was
computed for padding is written over by the row's next token, and no query sees a key that lies after it. Sliding
windows hide what is older; the buffers keep it. Not here: packed documents, which generation has none of.

Shapes: B rows, S tokens of a step, K key-value heads of this rank, D head size, L longest sequence.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model.attention import AttentionContext, Visible
from model.block import Block


@dataclass(frozen=True)
class CacheStep:
    """One forward pass: its tokens' places in their rows (None: from 0 on), and the keys that its queries may see."""

    buffers: Mapping[nn.Module, tuple[Tensor, Tensor]]
    positions_BS: Tensor | None
    rows_B1: Tensor | None  # 0 .. B - 1, beside positions
    keys: int

    def joined(self, layer: nn.Module, k_BKSD: Tensor, v_BKSD: Tensor) -> tuple[Tensor, Tensor]:
        """Write the step's keys and values of a layer; all that its queries may see, [B, K, keys, D] each."""
        places = self.buffers[layer]
        if self.positions_BS is None:
            for place, new in zip(places, (k_BKSD, v_BKSD), strict=True):
                place[:, :, : self.keys] = new
            return k_BKSD, v_BKSD
        for place, new in zip(places, (k_BKSD, v_BKSD), strict=True):
            place[self.rows_B1, :, self.positions_BS] = new.transpose(1, 2)
        return places[0][:, :, : self.keys], places[1][:, :, : self.keys]


class KeyValueCache:
    """Buffers [B, K, L, D] for each of `blocks`; every step has B rows."""

    def __init__(
        self, blocks: Iterable[Block], *, rows: int, length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.rows, self.length = rows, length
        self.buffers: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        for layer in (block.attention for block in blocks):
            shape = (rows, layer.key_value_heads, length, layer.head_dim)
            # Zeros: what no token has written yet is hidden, but 0 times a NaN would still be one.
            k, v = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
            self.buffers[layer] = k, v

    def kept(self, rows: Sequence[int]) -> KeyValueCache:
        """A cache of some of the rows, in this order; this one must not be used any more."""
        fewer = copy.copy(self)
        fewer.rows, fewer.buffers = len(rows), {}
        for layer in list(self.buffers):
            places = self.buffers.pop(layer)  # so that no more than one layer's is held twice
            index = torch.tensor(rows, device=places[0].device)
            fewer.buffers[layer] = places[0][index], places[1][index]
        return fewer

    def context(self, block: Block, hidden_BSH: Tensor, positions_BS: Tensor | None, *, keys: int) -> AttentionContext:
        """For all blocks of the model. `positions_BS` None: the first tokens of every row, S == keys; else tokens at
        these places, all below `keys`, after others that were computed before.
        """
        if positions_BS is None:
            step = CacheStep(self.buffers, None, None, keys)
            return dataclasses.replace(block.context(hidden_BSH, None), cache=step)
        step = CacheStep(self.buffers, positions_BS, torch.arange(self.rows, device=hidden_BSH.device)[:, None], keys)
        device, dtype = hidden_BSH.device, hidden_BSH.dtype
        cos, sin = None, None
        if block.rotary is not None:
            cos, sin = block.rotary(self.length, positions_BS, device=device, dtype=dtype)
        kinds = {None if window is None or window >= keys else window for window in block.windows}
        visible = {window: Visible(None, key_mask(positions_BS, keys, window)) for window in kinds}
        return AttentionContext(visible, cos, sin, step)


def key_mask(positions_BS: Tensor, keys: int, window: int | None) -> Tensor:
    """[B, 1, S, keys], True where the query at position p sees key j: p - window < j <= p."""
    index = torch.arange(keys, device=positions_BS.device)
    place_BS1 = positions_BS[:, :, None]
    seen_BSL = index <= place_BS1
    if window is not None:
        seen_BSL &= index > place_BS1 - window
    return seen_BSL[:, None]
