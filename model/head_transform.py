"""BERT's layer between the last block and the logits: a dense layer, the activation and a norm.

arXiv:1810.04805; in Megatron's order the final norm comes first (arXiv:1909.08053 figure 7). Replicated on the tensor
axis, as Megatron-LM has it: under sequence parallelism each rank has its share of the tokens, and the gradients are
summed over the axis. The tied head's bias lives here, since its table may be another layer's module: it is handed on
to the head, which adds it. Not here: the logits (`model.embedding.tied_logits`).

Shapes: B micro-batch, S sequence, H hidden, V padded vocabulary, T tensor ranks.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from conf.schema import ModelConfig
from model.block import build_norm
from model.mlp import ACTIVATIONS
from model.tensor_parallel.collectives import copy_to
from model.tensor_parallel.init import constant_parameter, normal_parameter
from model.tensor_parallel.parameter import describe
from parallel.architecture import architecture
from parallel.groups import SINGLE, AxisGroup


class ReplicatedLinear(nn.Module):
    """y = x W^T + b, whole on every tensor rank: weight [O, I], bias [O]; x [..., I] -> [..., O].

    Communication: none forward; under sequence parallelism the gradients of weight and bias are all-reduced.
    """

    def __init__(
        self, in_features: int, out_features: int, *, name: str, tensor: AxisGroup, sequence_parallel: bool, seed: int,
        std: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.gradient_axis = tensor if sequence_parallel else SINGLE
        info = describe(f"{name}.weight", (out_features, in_features), tensor=tensor)
        self.weight = normal_parameter(info, tensor=tensor, seed=seed, std=std)
        bias = describe(f"{name}.bias", (out_features,), tensor=tensor)
        self.bias = constant_parameter(bias, tensor=tensor, value=0.0)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, copy_to(self.weight, self.gradient_axis), copy_to(self.bias, self.gradient_axis))


class HeadTransform(nn.Module):
    """hidden [B, S, H] (sequence parallel: [B, S/T, H]), or (hidden, positions) -> (the same shape, bias [V/T]).

    Split: the bias, over the vocabulary. norm(act(W x + b)), x being final_norm(hidden) where blocks are pre-norm.
    """

    def __init__(
        self, model: ModelConfig, *, padded_vocab_size: int, tensor: AxisGroup, sequence_parallel: bool, seed: int
    ) -> None:
        super().__init__()
        parts = architecture(model)
        shared: dict[str, Any] = dict(tensor=tensor, sequence_parallel=sequence_parallel)
        self.final_norm = None if parts.post_norm else build_norm(model, name="final_norm", **shared)
        self.dense = ReplicatedLinear(
            model.hidden_size, model.hidden_size, name="transform.dense", seed=seed, std=model.init_std, **shared
        )
        self.activation = ACTIVATIONS[parts.activation]
        self.norm = build_norm(model, name="transform.norm", **shared)
        info = describe(
            "transform.vocabulary.bias", (padded_vocab_size,), tensor=tensor, shard_dim=0, real_rows=model.vocab_size
        )
        self.vocabulary_bias = constant_parameter(info, tensor=tensor, value=0.0)

    def forward(self, x: Any) -> tuple[Tensor, Tensor]:
        hidden_BSH = x[0] if isinstance(x, tuple) else x
        if self.final_norm is not None:
            hidden_BSH = self.final_norm(hidden_BSH)
        return self.norm(self.activation(self.dense(hidden_BSH))), self.vocabulary_bias
