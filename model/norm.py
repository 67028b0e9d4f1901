"""LayerNorm and RMSNorm over the hidden dim, replicated on the tensor axis.

Under sequence parallelism each rank norms its share of the sequence, and the weights' gradients are summed over the
tensor axis in backward (arXiv:2205.05198 section 4.2.2).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.tensor_parallel.collectives import copy_to
from model.tensor_parallel.init import constant_parameter
from model.tensor_parallel.parameter import describe
from parallel.groups import SINGLE, AxisGroup


class LayerNorm(nn.Module):
    """y = (x - mean) / sqrt(var + epsilon) * weight + bias (arXiv:1607.06450); x [..., H]."""

    def __init__(
        self, hidden_size: int, *, epsilon: float, name: str, tensor: AxisGroup, sequence_parallel: bool
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.gradient_axis = tensor if sequence_parallel else SINGLE
        self.weight = constant_parameter(
            describe(f"{name}.weight", (hidden_size,), tensor=tensor), tensor=tensor, value=1.0
        )
        self.bias = constant_parameter(
            describe(f"{name}.bias", (hidden_size,), tensor=tensor), tensor=tensor, value=0.0
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = copy_to(self.weight, self.gradient_axis), copy_to(self.bias, self.gradient_axis)
        return F.layer_norm(x, weight.shape, weight, bias, self.epsilon)


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + epsilon) * weight (arXiv:1910.07467); x [..., H]."""

    def __init__(
        self, hidden_size: int, *, epsilon: float, name: str, tensor: AxisGroup, sequence_parallel: bool
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.gradient_axis = tensor if sequence_parallel else SINGLE
        self.weight = constant_parameter(
            describe(f"{name}.weight", (hidden_size,), tensor=tensor), tensor=tensor, value=1.0
        )

    def forward(self, x: Tensor) -> Tensor:
        weight = copy_to(self.weight, self.gradient_axis)
        if x.device.type == "cpu" and x.dtype == weight.dtype != torch.bfloat16:
            return _RMSNorm.apply(x, weight, self.epsilon)
        return F.rms_norm(x, weight.shape, weight, self.epsilon)


class _RMSNorm(torch.autograd.Function):
    """F.rms_norm in half the passes over memory that torch's composite takes on a CPU; keeps x and one number a row."""

    @staticmethod
    def forward(ctx, x, weight, epsilon: float):  # type: ignore[override]
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = length.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, scale, weight)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        x, scale, weight = ctx.saved_tensors
        width = x.shape[-1]
        normed = x * scale
        product = (grad * normed).view(-1, width)
        grad_weight = product.sum(0)
        # d/dx = scale (g w - normed mean(g w normed))
        mean = torch.mv(product, weight).div_(-width).view(scale.shape)
        grad_x = torch.mul(grad, weight, out=product.view(x.shape)).addcmul_(normed, mean).mul_(scale)
        return grad_x, grad_weight, None
