"""The two feed-forward layers: plain (GELU and others) and SwiGLU (arXiv:2002.05202), split over the tensor axis.

Shapes: B micro-batch, S sequence, H hidden, F feed-forward width, T tensor ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.schema import Activation, ModelConfig
from model.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from parallel.groups import AxisGroup
from parallel.sizes import sizes

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.gelu_tanh: partial(F.gelu, approximate="tanh"),
    Activation.gelu: F.gelu,
    Activation.relu: F.relu,
    Activation.silu: F.silu,
}


class MLP(nn.Module):
    """Split: the feed-forward width. Communication: that of a column- and a row-parallel linear layer.

    hidden [B, S, H] (sequence parallel: [B, S/T, H]) -> [B, S, H].
    Plain: W_down act(W_up x), act one of `ACTIVATIONS`. SwiGLU: W_down (silu(W_gate x) * W_up x), gate and up one
    matrix product whose rank's rows are [gate_t; up_t], so that matching features meet on one rank.
    """

    def __init__(self, model: ModelConfig, *, name: str, tensor: AxisGroup, sequence_parallel: bool, seed: int) -> None:
        super().__init__()
        shape = sizes(model)
        self.gated, width = shape.parts.gated, shape.ffn_hidden_size
        self.activation = ACTIVATIONS[shape.parts.activation]
        self.up = ColumnParallelLinear(
            model.hidden_size,
            2 * width if self.gated else width,
            name=f"{name}.gate_up" if self.gated else f"{name}.up",
            tensor=tensor,
            sequence_parallel=sequence_parallel,
            bias=shape.parts.mlp_bias,
            seed=seed,
            std=model.init_std,
            sections=(("gate", width), ("up", width)) if self.gated else (),
        )
        self.down = RowParallelLinear(
            width,
            model.hidden_size,
            name=f"{name}.down",
            tensor=tensor,
            sequence_parallel=sequence_parallel,
            bias=shape.parts.mlp_bias,
            seed=seed,
            std=shape.residual_std,
        )

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        up = self.up(hidden_BSH)
        return self.down(swiglu(up) if self.gated else self.activation(up))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):  # type: ignore[override]
        ctx.save_for_backward(gate_up)  # and nothing else: half of what autograd would keep
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_gate_up


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2 F] (gate, up) -> silu(gate) * up, [..., F]."""
    return _SwiGLU.apply(gate_up)
