"""A ModelConfig written as the config.json with which transformers builds the same model.

Rotary settings are written twice: as transformers 5 has them and as all versions before it read them. Not here: the way
back (`conf.huggingface`).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from conf.huggingface import HEADS, MODEL_TYPES
from conf.schema import Activation, Family, ModelConfig
from parallel.architecture import BIDIRECTIONAL, CHOSEN, FULL, SLIDING, windows
from parallel.sizes import Sizes, sizes

ACTIVATION_NAMES = {
    Activation.gelu_tanh: "gelu_new", Activation.gelu: "gelu", Activation.relu: "relu", Activation.silu: "silu",
}  # fmt: skip
# Of a model's knobs, those that a forward pass does not depend on: labels, training, padding.
FREE = ("name", "hidden_dropout", "attention_dropout", "init_std", "make_vocab_size_divisible_by")


def huggingface_config(model: ModelConfig, *, dtype: str = "float32") -> dict[str, Any]:
    """The content of config.json; `dtype`: of the weights beside it, by torch's name."""
    shared = {
        "architectures": [HEADS[model.family]], "model_type": MODEL_TYPES[model.family], "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_word_embeddings, "initializer_range": model.init_std, "dtype": dtype,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    size = sizes(model)
    if model.family is Family.gpt2:
        return shared | _gpt2(model, size)
    if model.family in BIDIRECTIONAL:
        return shared | _bert(model, size)
    shared |= {
        "hidden_size": model.hidden_size, "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads, "intermediate_size": size.ffn_hidden_size,
        "max_position_embeddings": model.max_position_embeddings, "attention_dropout": model.attention_dropout,
    }  # fmt: skip
    if model.family is Family.gpt_neox:
        return shared | _gpt_neox(model, size)
    return shared | _llama(model, size)


def _gpt2(model: ModelConfig, size: Sizes) -> dict[str, Any]:
    return {
        "n_positions": model.max_position_embeddings, "n_embd": model.hidden_size, "n_layer": model.num_layers,
        "n_head": model.num_attention_heads, "n_inner": size.ffn_hidden_size,
        "activation_function": ACTIVATION_NAMES[size.parts.activation], "layer_norm_epsilon": model.norm_epsilon,
        "embd_pdrop": model.hidden_dropout, "resid_pdrop": model.hidden_dropout, "attn_pdrop": model.attention_dropout,
    }  # fmt: skip


def _gpt_neox(model: ModelConfig, size: Sizes) -> dict[str, Any]:
    parts = size.parts
    rope = _rope(model, {"partial_rotary_factor": parts.rotary_fraction})
    return rope | {
        "rotary_emb_base": model.rope_theta, "rotary_pct": parts.rotary_fraction,
        "hidden_act": ACTIVATION_NAMES[parts.activation], "layer_norm_eps": model.norm_epsilon,
        "use_parallel_residual": parts.parallel_residual, "attention_bias": parts.qkv_bias,
        "hidden_dropout": model.hidden_dropout,
    }  # fmt: skip


def _bert(model: ModelConfig, size: Sizes) -> dict[str, Any]:
    return {
        "hidden_size": model.hidden_size, "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads, "intermediate_size": size.ffn_hidden_size,
        "max_position_embeddings": model.max_position_embeddings, "type_vocab_size": size.parts.token_types,
        "hidden_act": ACTIVATION_NAMES[size.parts.activation], "layer_norm_eps": model.norm_epsilon,
        "hidden_dropout_prob": model.hidden_dropout, "attention_probs_dropout_prob": model.attention_dropout,
        "pad_token_id": None,  # transformers' own 0 would keep that row of the word table from its gradient
    }  # fmt: skip


def _llama(model: ModelConfig, size: Sizes) -> dict[str, Any]:
    found = _rope(model, {}) | {
        "num_key_value_heads": size.num_key_value_heads, "head_dim": size.head_dim, "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
    }  # fmt: skip
    if model.family in CHOSEN["attention_bias"]:
        found["attention_bias"] = size.parts.qkv_bias
    if model.family in CHOSEN["mlp_bias"]:
        found["mlp_bias"] = size.parts.mlp_bias
    if model.family is Family.mistral:
        found["sliding_window"] = model.sliding_window
    if model.family in CHOSEN["layer_types"]:
        kinds = [FULL if window is None else SLIDING for window in windows(model)]
        found |= {
            "use_sliding_window": SLIDING in kinds, "layer_types": kinds,
            "sliding_window": model.sliding_window if SLIDING in kinds else None,
            "max_window_layers": kinds.index(SLIDING) if SLIDING in kinds else model.num_layers,
        }  # fmt: skip
    return found


def _rope(model: ModelConfig, more: dict[str, Any]) -> dict[str, Any]:
    scaling = dict(model.rope_scaling or {})
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    parameters = {"rope_type": kind, **scaling, "rope_theta": model.rope_theta, **more}
    old = None if kind == "default" else {"rope_type": kind, **scaling}
    return {"rope_theta": model.rope_theta, "rope_scaling": old, "rope_parameters": parameters}


def model_differences(theirs: ModelConfig, ours: ModelConfig) -> list[str]:
    """Knobs in which two models compute something else, a line each; none where they are one model."""
    there, here = _whole(theirs), _whole(ours)
    return [f"model.{key} is {there[key]} there and {here[key]} here" for key in here if there[key] != here[key]]


def _whole(model: ModelConfig) -> dict[str, Any]:
    """The knobs that matter, with what null stands for."""
    size = sizes(model)
    parts = {key: getattr(value, "value", value) for key, value in asdict(size.parts).items()}
    rope = _rope(model, {})["rope_parameters"] if size.parts.rotary else {}
    knobs = {key: getattr(value, "value", value) for key, value in asdict(model).items() if key not in FREE}
    return knobs | {
        "num_key_value_heads": size.num_key_value_heads, "head_dim": size.head_dim,
        "ffn_hidden_size": size.ffn_hidden_size, "activation": parts["activation"], "mlp_bias": parts["mlp_bias"],
        "attention_bias": (parts["qkv_bias"], parts["out_bias"]), "rotary_fraction": parts["rotary_fraction"],
        "parallel_residual": parts["parallel_residual"], "rope_theta": rope.pop("rope_theta", None),
        "rope_scaling": _filled(rope, model), "sliding_window": windows(model), "layer_types": None,
        "type_vocab_size": size.parts.token_types,
    }  # fmt: skip


def _filled(rope: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    if rope.get("rope_type") in ("llama3", "yarn"):
        rope.setdefault("original_max_position_embeddings", model.max_position_embeddings)
    return rope
