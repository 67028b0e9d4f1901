"""Weights to and from transformers' GPT2LMHeadModel and LlamaForCausalLM, as whole tensors.

Works on canonical tensors (see `model.tensor_parallel.parameter`), so it knows nothing of plans. GPT-2 keeps its
matrices transposed (Conv1D) and query, key, value in one; Llama's names map one to one. Not here: reading or writing
files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from conf.schema import Family, ModelConfig
from model.tensor_parallel.parameter import from_canonical, slice_for_rank
from parallel.groups import AxisGroup
from parallel.sizes import sizes

_LLAMA_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
_LLAMA_ENDS = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_GPT2_BLOCK = {
    "attention_norm": "ln_1",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_GPT2_ENDS = {
    "embedding.word_embeddings.weight": "transformer.wte.weight",
    "embedding.position_embeddings.weight": "transformer.wpe.weight",
    "final_norm.weight": "transformer.ln_f.weight",
    "final_norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
}
_QKV = ("attention.query", "attention.key", "attention.value")


@dataclass(frozen=True)
class Stored:
    """Where a canonical tensor lies in a transformers state dict: part `part` of `parts` equal ones along the rows of
    `name`, which is kept transposed ([inputs, outputs]) where `transposed`.
    """

    name: str
    transposed: bool = False
    part: int = 0
    parts: int = 1


def stored_tensors(model: ModelConfig) -> dict[str, Stored]:
    """Canonical name -> its place, for every tensor of the model; a tied head has none of its own."""
    llama = model.family == Family.llama
    places = {ours: Stored(theirs) for ours, theirs in (_LLAMA_ENDS if llama else _GPT2_ENDS).items()}
    if model.tie_word_embeddings:
        del places["head.weight"]
    for index in range(model.num_layers):
        if llama:
            places |= {f"blocks.{index}.{a}": Stored(f"model.layers.{index}.{b}") for a, b in _LLAMA_BLOCK.items()}
            continue
        for leaf in ("weight", "bias"):
            for ours, theirs in _GPT2_BLOCK.items():
                name = f"transformer.h.{index}.{theirs}.{leaf}"
                places[f"blocks.{index}.{ours}.{leaf}"] = Stored(name, _is_conv1d(name))
            for part, ours in enumerate(_QKV):
                name = f"transformer.h.{index}.attn.c_attn.{leaf}"
                places[f"blocks.{index}.{ours}.{leaf}"] = Stored(name, _is_conv1d(name), part, len(_QKV))
    return places


def _is_conv1d(name: str) -> bool:
    """GPT-2's Conv1D keeps [inputs, outputs]."""
    return ".c_" in name and name.endswith(".weight")


def huggingface_config(model: ModelConfig) -> dict[str, Any]:
    """The content of config.json with which transformers builds this model."""
    derived = sizes(model)
    shared = {"vocab_size": model.vocab_size, "tie_word_embeddings": model.tie_word_embeddings, "dtype": "float32"}
    if model.family == Family.gpt2:
        return shared | {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_positions": model.max_position_embeddings,
            "n_embd": model.hidden_size, "n_layer": model.num_layers, "n_head": model.num_attention_heads,
            "n_inner": derived.ffn_hidden_size, "activation_function": "gelu_new",
            "layer_norm_epsilon": model.norm_epsilon,
            "embd_pdrop": model.hidden_dropout, "resid_pdrop": model.hidden_dropout,
            "attn_pdrop": model.attention_dropout, "bos_token_id": None, "eos_token_id": None,
        }  # fmt: skip
    return shared | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers, "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": derived.num_key_value_heads, "head_dim": derived.head_dim,
        "intermediate_size": derived.ffn_hidden_size,
        "max_position_embeddings": model.max_position_embeddings, "rms_norm_eps": model.norm_epsilon,
        "attention_bias": False, "mlp_bias": False,
        "rope_parameters": {"rope_type": "default", **(model.rope_scaling or {}), "rope_theta": model.rope_theta},
        "attention_dropout": model.attention_dropout, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


# What config.json says without changing what a forward pass computes.
_ASIDE = (
    *("architectures", "dtype", "bos_token_id", "eos_token_id"),
    *("attention_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop"),
)
_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # older transformers saved these too


def differences_from(names: Iterable[str], config: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """Why a folder of weights with these tensor names and this config.json (may be empty) is not this model."""
    differences = []
    for key, ours in huggingface_config(model).items():
        theirs = config.get(key)
        if key == "rope_parameters" and theirs is None and "rope_theta" in config:  # transformers before 5
            key, ours, theirs = "rope_theta", model.rope_theta, config["rope_theta"]
        if key not in _ASIDE and theirs is not None and theirs != ours:
            differences.append(f"{key} is {theirs} there and {ours} here")
    names = {name for name in names if not name.endswith(_BUFFERS)}
    wanted = {place.name for place in stored_tensors(model).values()}
    if missing := sorted(wanted - names):
        differences.append(f"it has no tensor {missing[0]}" + _and_more(missing))
    if extra := sorted(names - wanted - ({"lm_head.weight"} if model.tie_word_embeddings else set())):
        differences.append(f"this model has no tensor {extra[0]}" + _and_more(extra))
    return differences


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def to_huggingface_state(canonical: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Canonical whole tensors -> a transformers state dict, `lm_head.weight` included when tied.

    Raises ValueError naming a tensor that is missing.
    """
    pieces: dict[Stored, list[Tensor]] = {}
    for ours, place in stored_tensors(model).items():
        pieces.setdefault(replace(place, part=0), []).append(_take(canonical, ours))
    state = {}
    for place, parts in pieces.items():
        tensor = parts[0] if place.parts == 1 else torch.cat(parts)
        state[place.name] = tensor.t().contiguous() if place.transposed else tensor
    if model.tie_word_embeddings:
        state["lm_head.weight"] = _take(canonical, "embedding.word_embeddings.weight")
    return state


def from_huggingface_state(state: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """A transformers state dict -> canonical whole tensors. Raises ValueError naming a tensor that is missing."""
    canonical = {}
    for ours, place in stored_tensors(model).items():
        tensor = _take(state, place.name)
        rows = tensor.t() if place.transposed else tensor
        canonical[ours] = rows.chunk(place.parts)[place.part].contiguous()
    return canonical


def _take(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise ValueError(f"{name} is missing from the given weights; is model.family, num_layers or tying another?")
    return tensors[name]


def load_canonical(parameters: Iterable[nn.Parameter], canonical: Mapping[str, Tensor], *, tensor: AxisGroup) -> None:
    """Copy each parameter's part of canonical whole tensors into it. Raises ValueError on a missing or wrong tensor."""
    with torch.no_grad():
        for parameter in parameters:
            info = parameter.info  # type: ignore[attr-defined]
            parameter.copy_(slice_for_rank(from_canonical(canonical, info), info, tensor))


def load_huggingface_state(
    module: nn.Module, state: Mapping[str, Tensor], *, model: ModelConfig, tensor: AxisGroup
) -> None:
    """Load a transformers state dict of whole tensors into a module (any stage, any shard) of this model."""
    load_canonical(module.parameters(), from_huggingface_state(state, model), tensor=tensor)
