"""What a block is made of: the parts that a family fixes, and those that a model's own knobs choose.

One description for all that counts (sizes, bytes, FLOPs, collectives) and for the block that computes. Pure Python.
Sources: GPT-2 (Radford et al. 2019), Llama (arXiv:2302.13971), Mistral (arXiv:2310.06825), Qwen2 (arXiv:2407.10671),
Qwen3 (arXiv:2505.09388), GPT-NeoX (arXiv:2204.06745), BERT (arXiv:1810.04805) and Megatron's BERT (arXiv:1909.08053
section 5.3 and figure 7), each as transformers has it. Not here: how wide the parts are
(`parallel.sizes`), and what a folder of weights calls them (`model.huggingface_names`, `conf.huggingface`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from conf.schema import Activation, Config, Family, ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"  # transformers' names of the two kinds in layer_types


@dataclass(frozen=True)
class Architecture:
    """The parts of one model's blocks."""

    layer_norm: bool = False  # LayerNorm, with biases; else RMSNorm
    rotary_fraction: float = 1.0  # share of each head that is rotated; 0: a learned table of positions instead
    qkv_bias: bool = False
    out_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each query's and each key's head, before rotation
    gated: bool = True  # a gate beside the up projection: SwiGLU
    activation: Activation = Activation.silu
    parallel_residual: bool = False  # attention and feed-forward both read the block's input; else one after the other
    multi_head: bool = False  # as many key-value heads as heads, each hidden / heads wide
    causal: bool = True  # a token sees what is before it; else all of its document
    post_norm: bool = False  # norms follow the residual sums, and the embedding; there is none after the last block
    token_types: int = 0  # rows of a table of token types, the first of which is added to every token; 0: no table
    head_transform: bool = False  # a layer of its own before the tied head (dense, activation, norm), and a bias in it

    @property
    def rotary(self) -> bool:
        return self.rotary_fraction > 0


_GPT2 = Architecture(
    layer_norm=True, rotary_fraction=0.0, qkv_bias=True, out_bias=True, mlp_bias=True, gated=False,
    activation=Activation.gelu_tanh, multi_head=True,
)  # fmt: skip
_MEGATRON_BERT = replace(_GPT2, activation=Activation.gelu, causal=False, token_types=2, head_transform=True)
FAMILIES = {
    Family.gpt2: _GPT2,
    Family.llama: Architecture(),
    Family.mistral: Architecture(),
    Family.qwen2: Architecture(qkv_bias=True),
    Family.qwen3: Architecture(qk_norm=True),
    Family.gpt_neox: replace(_GPT2, rotary_fraction=0.25, activation=Activation.gelu, parallel_residual=True),
    Family.bert: replace(_MEGATRON_BERT, post_norm=True),
    Family.megatron_bert: _MEGATRON_BERT,
}
BIDIRECTIONAL = tuple(family for family, parts in FAMILIES.items() if not parts.causal)
# Knobs that null leaves to the family, and the families whose models differ in them.
CHOSEN = {
    "activation": (Family.gpt2, Family.gpt_neox, *BIDIRECTIONAL),
    "attention_bias": (Family.llama, Family.qwen3, Family.gpt_neox),
    "mlp_bias": (Family.llama,),
    "rotary_fraction": (Family.gpt_neox,),
    "parallel_residual": (Family.gpt_neox,),
    "sliding_window": (Family.mistral, Family.qwen2, Family.qwen3),
    "layer_types": (Family.qwen2, Family.qwen3),
    "type_vocab_size": BIDIRECTIONAL,
}


def architecture(model: ModelConfig) -> Architecture:
    """The family's parts with the model's own choices; no checks (see `problems`)."""
    parts = FAMILIES[model.family]
    chosen = {
        "activation": model.activation,
        "qkv_bias": model.attention_bias,
        "out_bias": model.attention_bias,
        "mlp_bias": model.mlp_bias,
        "rotary_fraction": model.rotary_fraction,
        "parallel_residual": model.parallel_residual,
        "token_types": model.type_vocab_size,
    }
    changes = {name: value for name, value in chosen.items() if value is not None}
    return replace(parts, **changes) if changes else parts  # type: ignore[arg-type]


# transformers' rope types: keys that each must have, and may have. original_max_position_embeddings is the model's own
# max_position_embeddings where it is left out.
ROPE_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
            "mscale_all_dim", "truncate",
        ),
    ),
}  # fmt: skip


def rope_kind(scaling: Mapping[str, Any] | None) -> str:
    """The rope_type of model.rope_scaling. ValueError where it, or one of its keys, is not known or lacks."""
    kind = scaling.get("rope_type", scaling.get("type", "default")) if scaling else "default"
    if kind not in ROPE_TYPES:
        raise ValueError(f"model.rope_scaling.rope_type={kind} is not known; use {', '.join(ROPE_TYPES)}")
    needed, allowed = ROPE_TYPES[kind]
    given = {key for key, value in (scaling or {}).items() if key not in ("rope_type", "type")}
    missing = [key for key in needed if (scaling or {}).get(key) is None]
    if missing:
        raise ValueError(f"model.rope_scaling of rope_type={kind} lacks {', '.join(missing)}; set them")
    unknown = sorted(given - {*needed, *allowed})
    if unknown:
        known = ", ".join((*needed, *allowed)) or "none"
        raise ValueError(f"model.rope_scaling.{unknown[0]} is no key of rope_type={kind}; its keys: {known}")
    return kind


def windows(model: ModelConfig, sequence_length: int | None = None) -> tuple[int | None, ...]:
    """Of each block: how many keys a query sees, its own included; None: all before it.

    A window that `sequence_length` does not exceed hides nothing and is None.
    """
    window = model.sliding_window
    if window is not None and sequence_length is not None and window >= sequence_length:
        window = None
    if model.layer_types is None:
        return (window,) * model.num_layers
    return tuple(window if kind == SLIDING else None for kind in model.layer_types)


def problems(model: ModelConfig) -> Iterator[str]:
    """Choices that the family does not have, one line each."""
    family = model.family.value
    for knob, families in CHOSEN.items():
        value = getattr(model, knob)
        if value is not None and model.family not in families:
            named = ", ".join(one.value for one in families)
            shown = getattr(value, "value", value)
            yield f"model.{knob}={shown} is no choice of model.family={family}; leave it null, or use {named}"
    if FAMILIES[model.family].head_transform and not model.tie_word_embeddings:
        yield (
            f"model.tie_word_embeddings=false is no choice of model.family={family}, whose head is the word table and "
            "a bias; set it to true"
        )
    if FAMILIES[model.family].multi_head:
        if model.num_key_value_heads not in (None, model.num_attention_heads):
            yield (
                f"model.num_key_value_heads={model.num_key_value_heads}: model.family={family} has as many as "
                f"model.num_attention_heads={model.num_attention_heads}; leave it null"
            )
        if model.head_dim is not None and model.head_dim * model.num_attention_heads != model.hidden_size:
            yield (
                f"model.head_dim={model.head_dim}: model.family={family} has heads of model.hidden_size="
                f"{model.hidden_size} / model.num_attention_heads={model.num_attention_heads}; leave it null"
            )
    yield from _layer_types(model)
    try:
        rope_kind(model.rope_scaling)
    except ValueError as error:
        yield str(error)


def positions_travel(config: Config) -> bool:
    """Whether positions go with the hidden state, so that every stage knows which tokens see one another: where
    documents are kept apart, and in a bidirectional model always, as its padding must not be seen.
    """
    return config.data.mask_documents or not FAMILIES[config.model.family].causal


def _layer_types(model: ModelConfig) -> Iterator[str]:
    if model.layer_types is None:
        return
    unknown = sorted(set(model.layer_types) - {FULL, SLIDING})
    if unknown:
        yield f"model.layer_types has {', '.join(unknown)}; use {FULL} and {SLIDING}"
    elif len(model.layer_types) != model.num_layers:
        yield f"model.layer_types names {len(model.layer_types)} blocks but model.num_layers={model.num_layers}"
    elif SLIDING in model.layer_types and model.sliding_window is None:
        yield f"model.layer_types has {SLIDING} but model.sliding_window is null; set it, in tokens"
