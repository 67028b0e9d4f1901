"""Weights to and from transformers' GPT2LMHeadModel and LlamaForCausalLM, as whole tensors.

Works on canonical tensors (see `model.tensor_parallel.parameter`), so it knows nothing of plans. GPT-2 keeps its
matrices transposed (Conv1D) and query, key, value in one; Llama's names map one to one. Not here: reading or writing
files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from conf.schema import Family, ModelConfig
from model.tensor_parallel.parameter import from_canonical, slice_for_rank
from parallel.groups import AxisGroup

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


def _names(model: ModelConfig) -> dict[str, str]:
    """Canonical name -> transformers name, for all tensors that map one to one."""
    llama = model.family == Family.llama
    names = dict(_LLAMA_ENDS if llama else _GPT2_ENDS)
    if model.tie_word_embeddings:
        del names["head.weight"]
    for index in range(model.num_layers):
        if llama:
            names |= {f"blocks.{index}.{a}": f"model.layers.{index}.{b}" for a, b in _LLAMA_BLOCK.items()}
            continue
        for leaf in ("weight", "bias"):
            names |= {
                f"blocks.{index}.{ours}.{leaf}": f"transformer.h.{index}.{theirs}.{leaf}"
                for ours, theirs in _GPT2_BLOCK.items()
            }
    return names


def _transposed(name: str) -> bool:
    """GPT-2's Conv1D keeps [inputs, outputs]."""
    return ".c_" in name and name.endswith(".weight")


def to_huggingface_state(canonical: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Canonical whole tensors -> a transformers state dict, `lm_head.weight` included when tied.

    Raises ValueError naming a tensor that is missing.
    """
    state = {}
    for ours, theirs in _names(model).items():
        tensor = _take(canonical, ours)
        state[theirs] = tensor.t().contiguous() if _transposed(theirs) else tensor
    if model.family == Family.gpt2:
        for index in range(model.num_layers):
            for leaf in ("weight", "bias"):
                qkv = torch.cat([_take(canonical, f"blocks.{index}.{part}.{leaf}") for part in _QKV])
                state[f"transformer.h.{index}.attn.c_attn.{leaf}"] = qkv.t().contiguous() if leaf == "weight" else qkv
    if model.tie_word_embeddings:
        state["lm_head.weight"] = _take(canonical, "embedding.word_embeddings.weight")
    return state


def from_huggingface_state(state: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """A transformers state dict -> canonical whole tensors. Raises ValueError naming a tensor that is missing."""
    canonical = {}
    for ours, theirs in _names(model).items():
        tensor = _take(state, theirs)
        canonical[ours] = tensor.t().contiguous() if _transposed(theirs) else tensor
    if model.family == Family.gpt2:
        for index in range(model.num_layers):
            for leaf in ("weight", "bias"):
                qkv = _take(state, f"transformer.h.{index}.attn.c_attn.{leaf}")
                pieces = (qkv.t().contiguous() if leaf == "weight" else qkv).chunk(3)
                canonical |= {f"blocks.{index}.{part}.{leaf}": piece for part, piece in zip(_QKV, pieces, strict=True)}
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
