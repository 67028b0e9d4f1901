"""Sizes that follow from a ModelConfig, and how many parameters each layer holds.

Pure Python: no torch. Not here: whether a plan may split these sizes (`parallel.rules`), what they cost in bytes
(`parallel.memory`) or FLOPs (`parallel.flops`). One number a layer whatever the layout: tied weights count once in the
whole model, replicated tensors once, padding rows of the vocabulary never.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import Family, ModelConfig


@dataclass(frozen=True)
class Sizes:
    """Derived sizes of the whole model."""

    head_dim: int
    num_key_value_heads: int
    ffn_hidden_size: int
    gated: bool  # SwiGLU: a gate beside the up projection
    has_bias: bool
    rotary: bool  # rotary positions; else a learned table
    norm_vectors: int  # vectors of hidden_size in one norm: weight, or weight and bias
    residual_std: float  # initial std of what writes to the residual stream


def sizes(model: ModelConfig) -> Sizes:
    """Derive what `model` leaves null; no checks."""
    heads = model.num_attention_heads
    llama = model.family == Family.llama
    return Sizes(
        head_dim=model.head_dim if model.head_dim is not None else model.hidden_size // heads,
        num_key_value_heads=model.num_key_value_heads if model.num_key_value_heads is not None else heads,
        ffn_hidden_size=model.ffn_hidden_size if model.ffn_hidden_size is not None else 4 * model.hidden_size,
        gated=llama,
        has_bias=not llama,
        rotary=llama,
        norm_vectors=1 if llama else 2,
        residual_std=model.init_std / (2 * model.num_layers) ** 0.5,
    )


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of one layer on one tensor rank: `sharded` are its share of split tensors, `replicated` are whole."""

    sharded: int
    replicated: int

    @property
    def total(self) -> int:
        return self.sharded + self.replicated


def block_parameters(model: ModelConfig, *, tp: int = 1) -> LayerParameters:
    """Of one block. Key-value heads fewer than tp are replicated so that each rank holds one."""
    s, hidden, heads = sizes(model), model.hidden_size, model.num_attention_heads
    query = heads * s.head_dim // tp
    key_value = max(1, s.num_key_value_heads // tp) * s.head_dim
    ffn = s.ffn_hidden_size // tp
    ups = 2 if s.gated else 1
    sharded = hidden * (query + 2 * key_value) + query * hidden + hidden * ffn * ups + ffn * hidden
    replicated = 2 * s.norm_vectors * hidden
    if s.has_bias:
        sharded += query + 2 * key_value + ffn * ups
        replicated += 2 * hidden
    return LayerParameters(sharded, replicated)


def embedding_parameters(model: ModelConfig, *, tp: int = 1, vocab_size: int | None = None) -> LayerParameters:
    """Of word and learned position tables; vocab_size: padded, where memory is meant."""
    vocab = model.vocab_size if vocab_size is None else vocab_size
    positions = model.max_position_embeddings * model.hidden_size if not sizes(model).rotary else 0
    return LayerParameters(vocab * model.hidden_size // tp, positions)


def final_norm_parameters(model: ModelConfig) -> LayerParameters:
    return LayerParameters(0, sizes(model).norm_vectors * model.hidden_size)


def head_parameters(model: ModelConfig, *, tp: int = 1, vocab_size: int | None = None) -> LayerParameters:
    """Of the output head as a matrix, whether or not it is the embedding's."""
    vocab = model.vocab_size if vocab_size is None else vocab_size
    return LayerParameters(vocab * model.hidden_size // tp, 0)


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model, the number papers quote: the same under every plan."""
    head = 0 if model.tie_word_embeddings else head_parameters(model).total
    return (
        embedding_parameters(model).total
        + model.num_layers * block_parameters(model).total
        + final_norm_parameters(model).total
        + head
    )
