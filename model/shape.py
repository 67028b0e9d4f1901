"""Numbers that follow from a ModelConfig: head size, key-value heads, feed-forward width.

Pure Python: no torch. Not here: anything that depends on the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import Family, ModelConfig


@dataclass(frozen=True)
class ModelShape:
    """Derived sizes of the whole model."""

    head_dim: int
    num_key_value_heads: int
    ffn_hidden_size: int
    has_bias: bool  # GPT-2: biases on every linear layer
    gated: bool  # Llama: SwiGLU
    rotary: bool  # Llama: rotary positions; GPT-2: a learned table
    residual_std: float  # initial std of what writes to the residual stream


def model_shape(model: ModelConfig) -> ModelShape:
    """Derive; raises ValueError on sizes that do not fit each other."""
    heads = model.num_attention_heads
    kv_heads = model.num_key_value_heads if model.num_key_value_heads is not None else heads
    if heads % kv_heads:
        raise ValueError(
            f"model.num_key_value_heads={kv_heads} does not divide model.num_attention_heads={heads}; use a divisor"
        )
    if model.head_dim is None and model.hidden_size % heads:
        raise ValueError(
            f"model.num_attention_heads={heads} does not divide model.hidden_size={model.hidden_size}; "
            "use a divisor or set model.head_dim"
        )
    head_dim = model.head_dim if model.head_dim is not None else model.hidden_size // heads
    llama = model.family == Family.llama
    if llama and head_dim % 2:
        raise ValueError(f"model.head_dim={head_dim} is odd; rotary positions need an even head size")
    return ModelShape(
        head_dim=head_dim,
        num_key_value_heads=kv_heads,
        ffn_hidden_size=model.ffn_hidden_size if model.ffn_hidden_size is not None else 4 * model.hidden_size,
        has_bias=not llama,
        gated=llama,
        rotary=llama,
        residual_std=model.init_std / (2 * model.num_layers) ** 0.5,
    )
