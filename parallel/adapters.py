"""Low-rank adapters as sizes: which matrices of a block get one, and how many values each tensor rank holds of them.

Pure Python, the counterpart of `model.adapters`, for ledgers and refusals before anything is built. Names are
transformers' own, of the modules inside a block; a target names a module by its last parts, as in PEFT.
"""

from __future__ import annotations

from collections.abc import Sequence

from conf.schema import Config, Family, LoraConfig, ModelConfig
from parallel.sizes import parameter_count, sizes
from parallel.states import Tensors

ALL_LINEAR = "all-linear"
_LLAMA = {
    "self_attn.q_proj": "query", "self_attn.k_proj": "key", "self_attn.v_proj": "key", "self_attn.o_proj": "out",
    "mlp.gate_proj": "up", "mlp.up_proj": "up", "mlp.down_proj": "down",
}  # fmt: skip
_GPT2 = {"attn.c_attn": "qkv", "attn.c_proj": "out", "mlp.c_fc": "up", "mlp.c_proj": "down"}
_GPT_NEOX = {
    "attention.query_key_value": "qkv", "attention.dense": "out", "mlp.dense_h_to_4h": "up",
    "mlp.dense_4h_to_h": "down",
}  # fmt: skip


def block_modules(model: ModelConfig) -> dict[str, str]:
    """Module inside a block -> what it is: qkv, query, key (values too), out, up (gates too) or down."""
    return {Family.gpt2: _GPT2, Family.gpt_neox: _GPT_NEOX}.get(model.family, _LLAMA)


def is_target(module: str, targets: Sequence[str]) -> bool:
    """PEFT's rule for a list of names."""
    return any(target == ALL_LINEAR or f".{module}".endswith(f".{target}") for target in targets)


def target_problems(model: ModelConfig, targets: Sequence[str]) -> list[str]:
    """One line where a target names no matrix of the blocks."""
    modules = block_modules(model)
    unknown = [target for target in targets if not any(is_target(module, [target]) for module in modules)]
    if targets and not unknown:
        return []
    known = ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in modules))
    named = f"{', '.join(unknown)} names" if unknown else "an empty list names"
    return [
        f"lora.target_modules=[{','.join(targets)}]: {named} no matrix of the blocks of model.family="
        f"{model.family.value}; use {ALL_LINEAR}, or some of {known}"
    ]


def block_adapters(model: ModelConfig, lora: LoraConfig, *, tp: int) -> Tensors:
    """Values of each adapter's A and B in one block, on one tensor rank.

    Beside a column-parallel matrix A is whole and B a share, beside a row-parallel one the other way round.
    """
    z, hidden, found = sizes(model), model.hidden_size, []
    query = model.num_attention_heads * z.head_dim
    rows = {
        "qkv": 3 * query // tp,
        "query": query // tp,
        "key": max(1, z.num_key_value_heads // tp) * z.head_dim,
        "up": z.ffn_hidden_size // tp,
    }
    columns = {"out": query // tp, "down": z.ffn_hidden_size // tp}
    for module, kind in block_modules(model).items():
        if is_target(module, lora.target_modules):
            found += [hidden, rows[kind]] if kind in rows else [columns[kind], hidden]
    return Tensors(tuple(lora.rank * n for n in found))


def adapter_count(config: Config) -> int:
    """Values of all adapters of the whole model."""
    return config.model.num_layers * block_adapters(config.model, config.lora, tp=1).total


def checkpoint_bytes(config: Config) -> int:
    """Of one checkpoint: what the run trains, adapters or the whole model, and its two moments, in fp32."""
    trained = adapter_count(config) if config.lora.rank > 0 else parameter_count(config.model)
    return 3 * 4 * trained
