"""A transformers config.json read as a ModelConfig. Nothing is guessed: each key is understood, known to be without
effect on what a forward pass computes, or refused by its name.

Missing keys have the values that transformers gives them. Pure Python, so that the command line can take a folder for
a model (`conf.model_folders`). Not here: the way back (`conf.huggingface_config`), weights (`model.huggingface_names`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from conf.huggingface_keys import WITHOUT_EFFECT, Keys, activation
from conf.schema import Family, ModelConfig
from parallel.architecture import BIDIRECTIONAL, CHOSEN, FULL, SLIDING, problems, rope_kind

CONFIG = "config.json"
# What must be off: each would compute something else, or hold other weights.
OFF = (
    "is_encoder_decoder", "add_cross_attention", "pruned_heads", "quantization_config", "auto_map", "use_mrope",
    "rope_interleaved", "num_experts", "num_local_experts", "compression_config",
)  # fmt: skip
HEADS = {
    Family.gpt2: "GPT2LMHeadModel", Family.llama: "LlamaForCausalLM", Family.mistral: "MistralForCausalLM",
    Family.qwen2: "Qwen2ForCausalLM", Family.qwen3: "Qwen3ForCausalLM", Family.gpt_neox: "GPTNeoXForCausalLM",
    Family.bert: "BertForMaskedLM", Family.megatron_bert: "MegatronBertForMaskedLM",
}  # fmt: skip

MODEL_TYPES = {family: family.value.replace("megatron_bert", "megatron-bert") for family in Family}


def read_config(path: Path) -> dict[str, Any]:
    """The content of a config.json, or of the one in a folder. Raises ValueError naming the file."""
    path = path / CONFIG if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a config.json of transformers: it holds no keys")
    return config


def model_of(config: Mapping[str, Any], *, name: str, ignored: Iterable[str] = ()) -> ModelConfig:
    """The model that transformers builds from this config.json. Raises ValueError, a line for each thing that is not
    supported; `ignored`: keys that the user says are without effect.
    """
    kind = config.get("model_type")
    if kind not in READERS:
        raise ValueError(f"model_type={json.dumps(kind)} is not supported; supported: {', '.join(READERS)}")
    family = Family(kind.replace("-", "_"))
    keys = Keys(config)
    keys.asked |= set(ignored)
    values = READERS[kind](keys, family)
    _nothing_else(keys, family)
    known = {key: value for key, value in values.items() if value is not None}
    model = ModelConfig(name=name, family=family, **known)
    if not keys.wrong:
        keys.wrong += problems(model)
    if keys.wrong:
        raise ValueError("\n".join(keys.wrong))
    return model


def _nothing_else(keys: Keys, family: Family) -> None:
    """What must be off is, the weights are a language model's, and no key is left that nobody has asked for."""
    for key in OFF:
        if keys.get(key, None) not in (None, False, {}, []) and key not in WITHOUT_EFFECT:
            keys.wrong.append(f"{key} is not supported")
    classes = keys.config.get("architectures") or [HEADS[family]]
    allowed = {HEADS[family], HEADS[family].replace("ForCausalLM", "Model").replace("LMHeadModel", "Model")}
    if family in BIDIRECTIONAL:
        allowed.add(HEADS[family].replace("ForMaskedLM", "ForPreTraining"))  # with next-sentence prediction beside
    if not set(classes) <= allowed:
        keys.wrong.append(f"architectures={json.dumps(classes)} is not supported; {HEADS[family]} is")
    keys.wrong += [
        f"{key} is not known, and so may matter; recipes/convert.py import --ignore {key} says that it does not"
        for key in sorted(set(keys.config) - keys.asked)
    ]


def _gpt2(keys: Keys, family: Family) -> dict[str, Any]:
    keys.must_be("scale_attn_weights", True)
    keys.must_be("scale_attn_by_inverse_layer_idx", False)
    keys.must_be("reorder_and_upcast_attn", False)
    hidden = keys.count("n_embd", 768)
    dropout = keys.number("resid_pdrop", 0.1)
    if keys.number("embd_pdrop", 0.1) != dropout:
        keys.wrong.append(
            f"embd_pdrop={keys.config.get('embd_pdrop', 0.1)} and resid_pdrop={dropout} differ; "
            "model.hidden_dropout is one for both: make them equal"
        )
    return {
        "vocab_size": keys.count("vocab_size", 50257), "hidden_size": hidden, "num_layers": keys.count("n_layer", 12),
        "num_attention_heads": keys.count("n_head", 12), "ffn_hidden_size": keys.count("n_inner", None) or 4 * hidden,
        "max_position_embeddings": keys.count("n_positions", 1024),
        "tie_word_embeddings": keys.flag("tie_word_embeddings", True),
        "norm_epsilon": keys.number("layer_norm_epsilon", 1e-5), "hidden_dropout": dropout,
        "attention_dropout": keys.number("attn_pdrop", 0.1), "init_std": keys.number("initializer_range", 0.02),
        "activation": activation(keys, "activation_function", "gelu_new"),
    }  # fmt: skip


def _gpt_neox(keys: Keys, family: Family) -> dict[str, Any]:
    return _shared(keys, family) | {
        "norm_epsilon": keys.number("layer_norm_eps", 1e-5), "hidden_dropout": keys.number("hidden_dropout", 0.0),
        "activation": activation(keys, "hidden_act", "gelu"),
        "parallel_residual": keys.flag("use_parallel_residual", True),
        "attention_bias": keys.flag("attention_bias", True),
    }  # fmt: skip


def _llama(keys: Keys, family: Family) -> dict[str, Any]:
    """Llama, and those that have its names."""
    values = _shared(keys, family)
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    values["norm_epsilon"] = keys.number("rms_norm_eps", 1e-6)
    values["num_key_value_heads"] = keys.count("num_key_value_heads", DEFAULTS[family].get("num_key_value_heads"))
    values["num_key_value_heads"] = values["num_key_value_heads"] or heads
    values["head_dim"] = keys.count("head_dim", DEFAULTS[family].get("head_dim")) or hidden // heads
    keys.must_be("hidden_act", "silu", "swish")
    if family in CHOSEN["attention_bias"]:
        values["attention_bias"] = keys.flag("attention_bias", False)
    if family in CHOSEN["mlp_bias"]:
        values["mlp_bias"] = keys.flag("mlp_bias", False)
    if family is Family.mistral:
        values["sliding_window"] = keys.count("sliding_window", 4096)
    if family in CHOSEN["layer_types"]:
        values |= _some_windows(keys, values["num_layers"])
    return values


def _bert(keys: Keys, family: Family) -> dict[str, Any]:
    """BERT, and Megatron's."""
    keys.asked |= {key for key in keys.config if key.startswith("pooler_")} | {"directionality"}  # no pooler here
    keys.must_be("position_embedding_type", "absolute")
    keys.must_be("is_decoder", False)  # it would be causal
    default = DEFAULTS[family]
    return {
        "vocab_size": keys.count("vocab_size", default["vocab_size"]),
        "hidden_size": keys.count("hidden_size", default["hidden_size"]),
        "num_layers": keys.count("num_hidden_layers", default["num_hidden_layers"]),
        "num_attention_heads": keys.count("num_attention_heads", default["num_attention_heads"]),
        "ffn_hidden_size": keys.count("intermediate_size", default["intermediate_size"]),
        "max_position_embeddings": keys.count("max_position_embeddings", default["max_position_embeddings"]),
        "type_vocab_size": keys.count("type_vocab_size", 2),
        "tie_word_embeddings": keys.flag("tie_word_embeddings", True),
        "norm_epsilon": keys.number("layer_norm_eps", 1e-12),
        "hidden_dropout": keys.number("hidden_dropout_prob", 0.1),
        "attention_dropout": keys.number("attention_probs_dropout_prob", 0.1),
        "init_std": keys.number("initializer_range", 0.02),
        "activation": activation(keys, "hidden_act", "gelu"),
    }


def _some_windows(keys: Keys, layers: int) -> dict[str, Any]:
    """Qwen's: none, or a window in the blocks from max_window_layers on, or in those that layer_types names."""
    window = keys.count("sliding_window", 4096)
    first = keys.number("max_window_layers", 28)
    kinds = keys.get("layer_types", None)
    if not keys.flag("use_sliding_window", False):
        window = None
    if kinds is None:
        kinds = [FULL if window is None or index < first else SLIDING for index in range(layers)]
    if SLIDING not in kinds:
        window = None
        if set(kinds) == {FULL} and len(kinds) == layers:
            return {}
    return {"sliding_window": window, "layer_types": list(kinds)}


# transformers' values of keys that a config.json may leave out; see the test that compares them with its classes.
DEFAULTS: dict[Family, dict[str, Any]] = {
    Family.llama: dict(vocab_size=32000, hidden_size=4096, intermediate_size=11008, max_position_embeddings=2048),
    Family.mistral: dict(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, max_position_embeddings=131072,
        num_key_value_heads=8,
    ),
    Family.qwen2: dict(
        vocab_size=151936, hidden_size=4096, intermediate_size=22016, max_position_embeddings=32768,
        num_key_value_heads=32,
    ),
    Family.qwen3: dict(
        vocab_size=151936, hidden_size=4096, intermediate_size=22016, max_position_embeddings=32768,
        num_key_value_heads=32, head_dim=128,
    ),
    Family.gpt_neox: dict(
        vocab_size=50432, hidden_size=6144, intermediate_size=24576, max_position_embeddings=2048,
        num_hidden_layers=44, num_attention_heads=64,
    ),
    Family.bert: dict(
        vocab_size=30522, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
        max_position_embeddings=512,
    ),
    Family.megatron_bert: dict(
        vocab_size=29056, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16,
        max_position_embeddings=512,
    ),
}  # fmt: skip


def _shared(keys: Keys, family: Family) -> dict[str, Any]:
    """What GPT-NeoX and Llama's relatives call alike."""
    default = {"num_hidden_layers": 32, "num_attention_heads": 32} | DEFAULTS[family]
    positions = keys.count("max_position_embeddings", default["max_position_embeddings"])
    return {
        "vocab_size": keys.count("vocab_size", default["vocab_size"]),
        "hidden_size": keys.count("hidden_size", default["hidden_size"]),
        "num_layers": keys.count("num_hidden_layers", default["num_hidden_layers"]),
        "num_attention_heads": keys.count("num_attention_heads", default["num_attention_heads"]),
        "ffn_hidden_size": keys.count("intermediate_size", default["intermediate_size"]),
        "max_position_embeddings": positions,
        "tie_word_embeddings": keys.flag("tie_word_embeddings", False),
        "attention_dropout": keys.number("attention_dropout", 0.0),
        "init_std": keys.number("initializer_range", 0.02),
        **_rope(keys, family, positions),
    }


def _rope(keys: Keys, family: Family, positions: int) -> dict[str, Any]:
    """rope_theta and rope_scaling as transformers wrote them before version 5, or its rope_parameters."""
    neox = family is Family.gpt_neox
    theta, share = keys.number("rope_theta", None), keys.number("partial_rotary_factor", None)
    if neox:  # has names of its own, and transformers passes over the others
        for shown, own in (("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "rotary_pct")):
            if keys.config.get(shown) not in (None, keys.config.get(own)) and "rope_parameters" not in keys.config:
                keys.wrong.append(f"{shown} has no effect for model_type=gpt_neox; {own} has")
        theta, share = keys.number("rotary_emb_base", 10000.0), keys.number("rotary_pct", 0.25)
    old, new = keys.get("rope_scaling", None), keys.get("rope_parameters", None)
    given = old or new or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        keys.wrong.append("rope_parameters for each kind of layer are not supported; one for all is")
        return {}
    scaling = dict(given)
    theta = scaling.pop("rope_theta", theta)
    share = scaling.pop("partial_rotary_factor", share)
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    if share not in (None, 1, 1.0) and not neox:
        keys.wrong.append(f"partial_rotary_factor={share} is not supported for model_type={family.value}; 1 is")
    try:
        rope_kind({"rope_type": kind, **scaling})
    except ValueError as error:
        keys.wrong.append(str(error).replace("model.rope_scaling", "rope_scaling"))
        return {}
    if kind in ("llama3", "yarn"):
        scaling.setdefault("original_max_position_embeddings", positions)
    scaling = {key: value for key, value in scaling.items() if value is not None}
    found = {"rope_theta": float(theta or 10000.0), "rope_scaling": {"rope_type": kind, **scaling}}
    if kind == "default":
        found["rope_scaling"] = {}
    return found | ({"rotary_fraction": share} if neox else {})


READERS: dict[str, Callable[[Keys, Family], dict[str, Any]]] = {
    "gpt2": _gpt2, "llama": _llama, "mistral": _llama, "qwen2": _llama, "qwen3": _llama, "gpt_neox": _gpt_neox,
    "bert": _bert, "megatron-bert": _bert,
}  # fmt: skip
