"""Rotary position embedding (arXiv:2104.09864) with transformers' ways to scale its frequencies.

linear: all divided by a factor. llama3: long wavelengths divided, short ones kept. yarn (arXiv:2309.00071): the same by
another ramp, and cosines and sines made larger. dynamic: as default up to max_position_embeddings, which no sequence
here exceeds.

Halves convention of Llama in transformers: of the R rotated elements of a head, its first ones, element i is paired
with element i + R/2. Angles are computed in fp32 whatever the model's dtype. Not here: learned positions
(`model.embedding`).

Shapes: B micro-batch, S sequence, N heads, D head size, R rotated elements.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from parallel.architecture import rope_kind


def inverse_frequencies(
    rotary_dim: int, *, theta: float, scaling: dict[str, Any] | None, max_positions: int
) -> tuple[Tensor, float]:
    """([R/2] fp32 angles per position, factor on cosines and sines). ValueError for a `scaling` that cannot be."""
    kind = rope_kind(scaling)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    frequencies = 1.0 / theta**exponents
    if kind in ("default", "dynamic"):
        return frequencies, 1.0
    assert scaling is not None
    if kind == "linear":
        return frequencies / scaling["factor"], 1.0
    context = scaling.get("original_max_position_embeddings", max_positions)
    if kind == "llama3":
        return _llama3(frequencies, scaling, context), 1.0
    return _yarn(theta**exponents, scaling, theta, context), yarn_scale(scaling)


def _llama3(frequencies: Tensor, scaling: dict[str, Any], context: int) -> Tensor:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a smooth ramp between."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / frequencies
    smooth = (context / wavelength - low) / (high - low)
    ramp = (1 - smooth) * frequencies / scaling["factor"] + smooth * frequencies
    scaled = torch.where(wavelength > context / low, frequencies / scaling["factor"], ramp)
    return torch.where(wavelength < context / high, frequencies, scaled)


def _yarn(periods: Tensor, scaling: dict[str, Any], theta: float, context: int) -> Tensor:
    """arXiv:2309.00071 section 3.2: pairs that turn more than beta_fast times in the context keep their frequency,
    those that turn less than beta_slow times have it divided, a linear ramp over the pairs between."""
    size = 2 * len(periods)

    def pair_that_turns(times: float) -> float:
        return size * math.log(context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.get("beta_fast") or 32), pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (torch.arange(len(periods), dtype=torch.float32) - low) / (high - low or 0.001)
    divided = ramp.clamp(0, 1)
    return divided / (scaling["factor"] * periods) + (1 - divided) / periods


def yarn_scale(scaling: dict[str, Any]) -> float:
    """What cosines and sines are multiplied by, so that scores keep their spread (equation 22)."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor, one, all_dim = scaling["factor"], scaling.get("mscale"), scaling.get("mscale_all_dim")
    if one and all_dim:
        return _mscale(factor, one) / _mscale(factor, all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


class Rotary:
    """Tables of cosines and sines, one for each (device, dtype), made longer as asked for, shared by a rank's blocks.

    Not an nn.Module: a cast of the model to bf16 must not round its frequencies.
    """

    def __init__(self, rotary_dim: int, *, theta: float, scaling: dict[str, Any] | None, max_positions: int) -> None:
        self.frequencies, self.scale = inverse_frequencies(
            rotary_dim, theta=theta, scaling=scaling, max_positions=max_positions
        )
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def tables(self, length: int, *, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin of positions 0 .. length-1, each [S, R/2]."""
        key = (device, dtype)
        held = len(self._tables[key][0]) if key in self._tables else 0
        if held < length:
            rows = max(length, 2 * held)  # prompts of many lengths: seldom made anew
            # Ordinary tensors even when first asked for inside inference_mode: training reuses them.
            with torch.inference_mode(False), torch.no_grad():
                wide = torch.promote_types(dtype, torch.float32)
                angles = torch.outer(torch.arange(rows, dtype=wide), self.frequencies.to(wide))
                cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
                self._tables[key] = (cos.to(device, dtype), sin.to(device, dtype))
        cos, sin = self._tables[key]
        return cos[:length], sin[:length]

    def __call__(
        self, length: int, positions_BS: Tensor | None, *, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """cos, sin as [S, 1, R/2], or [B, S, 1, R/2] for given positions (all below length)."""
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
    """out = x rotated: (a, b) -> (a cos - b sin, b cos + a sin) for the two halves a, b of each head's first part; the
    rest, where there is one, as it is."""
    rotated = 2 * cos.shape[-1]
    if rotated < x.shape[-1]:
        out[..., rotated:] = x[..., rotated:]
        x, out = x[..., :rotated], out[..., :rotated]
    a, b = x.chunk(2, dim=-1)
    out_a, out_b = out.chunk(2, dim=-1)
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin)


def rotate_and_split(
    qkv_BSND: Tensor, cos: Tensor, sin: Tensor, *, query_heads: int, key_value_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Fused QKV [B, S, q + 2 kv, D] -> rotated query [B, q, S, D], rotated key and plain value [B, kv, S, D]."""
    return _RotateAndSplit.apply(qkv_BSND, cos, sin, query_heads, key_value_heads)
