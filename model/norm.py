"""LayerNorm and RMSNorm over the hidden dim, replicated on the tensor axis.

Under sequence parallelism each rank norms its share of the sequence, and the weights' gradients are summed over the
tensor axis in backward (arXiv:2205.05198 section 4.2.2).
"""

from __future__ import annotations

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
        return F.rms_norm(x, weight.shape, weight, self.epsilon)
