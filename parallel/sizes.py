"""Sizes that follow from a ModelConfig, and how many parameters each layer holds.

Pure Python: no torch. Not here: whether a plan may split these sizes (`parallel.rules`), what they cost in bytes
(`parallel.memory`) or FLOPs (`parallel.flops`). One number a layer whatever the layout: tied weights count once in the
whole model, replicated tensors once, padding rows of the vocabulary never.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import ModelConfig
from parallel.architecture import Architecture, architecture


@dataclass(frozen=True)
class Sizes:
    """Derived sizes of the whole model, and the parts that its blocks are made of."""

    parts: Architecture
    head_dim: int
    num_key_value_heads: int
    ffn_hidden_size: int
    residual_std: float  # initial std of what writes to the residual stream

    @property
    def norm_vectors(self) -> int:
        """Vectors of hidden_size in one norm: weight, or weight and bias."""
        return 2 if self.parts.layer_norm else 1

    @property
    def rotary_dim(self) -> int:
        """Elements of each head that are rotated, the first ones; 0: positions are a learned table."""
        return int(self.head_dim * self.parts.rotary_fraction)


def sizes(model: ModelConfig) -> Sizes:
    """Derive what `model` leaves null; no checks."""
    heads = model.num_attention_heads
    return Sizes(
        parts=architecture(model),
        head_dim=model.head_dim if model.head_dim is not None else model.hidden_size // heads,
        num_key_value_heads=model.num_key_value_heads if model.num_key_value_heads is not None else heads,
        ffn_hidden_size=model.ffn_hidden_size if model.ffn_hidden_size is not None else 4 * model.hidden_size,
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
    parts, ups = s.parts, 2 if s.parts.gated else 1
    sharded = hidden * (query + 2 * key_value) + query * hidden + hidden * ffn * ups + ffn * hidden
    replicated = 2 * s.norm_vectors * hidden
    sharded += (query + 2 * key_value) * parts.qkv_bias + ffn * ups * parts.mlp_bias
    replicated += hidden * (parts.out_bias + parts.mlp_bias) + 2 * s.head_dim * parts.qk_norm
    return LayerParameters(sharded, replicated)


def embedding_parameters(model: ModelConfig, *, tp: int = 1, vocab_size: int | None = None) -> LayerParameters:
    """Of word, learned position and token type tables, and of a norm after them; vocab_size: padded, where memory is
    meant."""
    size = sizes(model)
    vocab = model.vocab_size if vocab_size is None else vocab_size
    rows = size.parts.token_types + (0 if size.parts.rotary else model.max_position_embeddings)
    rows += size.norm_vectors if size.parts.post_norm else 0
    return LayerParameters(vocab * model.hidden_size // tp, rows * model.hidden_size)


def before_head_parameters(model: ModelConfig, *, tp: int = 1, vocab_size: int | None = None) -> LayerParameters:
    """Of what lies between the last block and the logits: the final norm; BERT's transform, and its head's bias."""
    size, hidden = sizes(model), model.hidden_size
    final_norm = 0 if size.parts.post_norm else size.norm_vectors * hidden
    if not size.parts.head_transform:
        return LayerParameters(0, final_norm)
    vocab = model.vocab_size if vocab_size is None else vocab_size
    return LayerParameters(vocab // tp, final_norm + hidden * hidden + hidden + size.norm_vectors * hidden)


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
        + before_head_parameters(model).total
        + head
    )
