"""Bytes of activations that one block keeps for backward, tensor by tensor."""

from __future__ import annotations

from conf.schema import Config, DType
from parallel.sizes import sizes


def block_activation_bytes(config: Config) -> int:
    """Of one block and one micro-batch on one rank."""
    model, tp = config.model, config.parallel.tp
    s = sizes(model)
    element = 4 if config.precision.dtype is DType.fp32 else 2
    tokens = config.train.micro_batch_size * config.data.sequence_length
    query = model.num_attention_heads * s.head_dim // tp
    key_value = max(1, s.num_key_value_heads // tp) * s.head_dim
    widths = 4 * model.hidden_size + 2 * query + 2 * key_value + (3 if s.gated else 2) * s.ffn_hidden_size // tp
    return tokens * element * widths
