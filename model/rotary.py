"""Rotary position embedding (arXiv:2104.09864) with transformers' `linear` and `llama3` frequency scaling.

Halves convention of Llama in transformers: element i of a head is paired with element i + D/2. Angles are computed in
fp32 whatever the model's dtype. Not here: learned positions (`model.embedding`).

Shapes: B micro-batch, S sequence, N heads, D head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def inverse_frequencies(head_dim: int, *, theta: float, scaling: dict[str, Any] | None) -> Tensor:
    """[D/2] fp32 angles per position. `scaling`: {rope_type: default | linear | llama3, ...}; ValueError otherwise."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    kind = "default" if not scaling else scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequencies
    if kind not in ("linear", "llama3"):
        raise ValueError(f"model.rope_scaling.rope_type={kind} is not known; use default, linear or llama3")
    assert scaling is not None
    needed = ["factor"]
    if kind == "llama3":
        needed += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    missing = [key for key in needed if key not in scaling]
    if missing:
        raise ValueError(f"model.rope_scaling of rope_type={kind} lacks {', '.join(missing)}; set them")
    if kind == "linear":
        return frequencies / scaling["factor"]
    return _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a smooth ramp between."""
    low, high, context = (
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
        scaling["original_max_position_embeddings"],
    )
    wavelength = 2 * math.pi / frequencies
    smooth = (context / wavelength - low) / (high - low)
    ramp = (1 - smooth) * frequencies / scaling["factor"] + smooth * frequencies
    scaled = torch.where(wavelength > context / low, frequencies / scaling["factor"], ramp)
    return torch.where(wavelength < context / high, frequencies, scaled)


class Rotary:
    """Tables of cosines and sines, made once for each (length, device, dtype) and shared by all blocks of a rank.

    Not an nn.Module: a cast of the model to bf16 must not round its frequencies.
    """

    def __init__(self, head_dim: int, *, theta: float, scaling: dict[str, Any] | None) -> None:
        self.frequencies = inverse_frequencies(head_dim, theta=theta, scaling=scaling)
        self._tables: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def tables(self, length: int, *, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin of positions 0 .. length-1, each [S, D/2]."""
        key = (length, device, dtype)
        if key not in self._tables:
            # Ordinary tensors even when first asked for inside inference_mode: training reuses them.
            with torch.inference_mode(False), torch.no_grad():
                wide = torch.promote_types(dtype, torch.float32)
                angles = torch.outer(torch.arange(length, dtype=wide), self.frequencies.to(wide))
                self._tables[key] = (angles.cos().to(device, dtype), angles.sin().to(device, dtype))
        return self._tables[key]

    def __call__(
        self, length: int, positions_BS: Tensor | None, *, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """cos, sin as [S, 1, D/2], or [B, S, 1, D/2] for given positions (all below length)."""
        cos, sin = self.tables(length, device=device, dtype=dtype)
        if positions_BS is not None:
            cos, sin = cos[positions_BS], sin[positions_BS]
        return cos.unsqueeze(-2), sin.unsqueeze(-2)


class _RotateAndSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, query_heads: int, key_value_heads: int):  # type: ignore[override]
        ctx.save_for_backward(cos, sin)
        batch, length, _, size = qkv.shape
        parts = qkv.split([query_heads, key_value_heads, key_value_heads], dim=2)
        q = qkv.new_empty((batch, query_heads, length, size))
        k, v = (qkv.new_empty((batch, key_value_heads, length, size)) for _ in range(2))
        _rotate(parts[0], cos, sin, q.transpose(1, 2))
        _rotate(parts[1], cos, sin, k.transpose(1, 2))
        v.copy_(parts[2].transpose(1, 2))
        return q, k, v

    @staticmethod
    def backward(ctx, grad_q, grad_k, grad_v):  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        batch, query_heads, length, size = grad_q.shape
        key_value_heads = grad_k.shape[1]
        grad = grad_q.new_empty((batch, length, query_heads + 2 * key_value_heads, size))
        q, k, v = grad.split([query_heads, key_value_heads, key_value_heads], dim=2)
        _rotate(grad_q.transpose(1, 2), cos, -sin, q)
        _rotate(grad_k.transpose(1, 2), cos, -sin, k)
        v.copy_(grad_v.transpose(1, 2))
        return grad, None, None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """out = x rotated: (a, b) -> (a cos - b sin, b cos + a sin) for the two halves a, b of each head."""
    a, b = x.chunk(2, dim=-1)
    out_a, out_b = out.chunk(2, dim=-1)
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin)


def rotate_and_split(
    qkv_BSND: Tensor, cos: Tensor, sin: Tensor, *, query_heads: int, key_value_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Fused QKV [B, S, q + 2 kv, D] -> rotated query [B, q, S, D], rotated key and plain value [B, kv, S, D]."""
    return _RotateAndSplit.apply(qkv_BSND, cos, sin, query_heads, key_value_heads)
