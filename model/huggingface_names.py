"""Where each tensor of the model lies in a folder of weights as transformers has it: names, fused and transposed ones.

GPT-2 keeps its matrices transposed (Conv1D) and query, key, value one below the other in one; GPT-NeoX keeps them in
one too, head by head: [heads, 3, head size]. Llama's names map one to one; Mistral, Qwen2 and Qwen3 have its names and
more; BERT's map one to one too. `names_in_folder` knows what older versions and other publishers called them. Not here:
moving values (`model.huggingface`, `model.placement`), config.json (`conf.huggingface`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from conf.schema import Family, ModelConfig
from parallel.sizes import Sizes, sizes


@dataclass(frozen=True)
class Stored:
    """Where a canonical tensor lies in a transformers state dict: part `part` of `parts` equal ones along the rows of
    `name`, which is kept transposed ([inputs, outputs]) where `transposed`. The parts take turns every `turn` rows
    (0: each is whole before the next).
    """

    name: str
    transposed: bool = False
    part: int = 0
    parts: int = 1
    turn: int = 0


@dataclass(frozen=True)
class _Names:
    """A family's own: each of ours by the name of its layer, weights and biases alike."""

    prefix: str  # of everything but the head
    blocks: str
    ends: dict[str, str]
    block: dict[str, str]
    fused_qkv: str | None = None
    head: str = "lm_head"
    conv1d: bool = False
    head_bias: str | None = None
    aside: tuple[str, ...] = ()  # beginnings of the names of other tasks' tensors


_LLAMA = _Names(
    prefix="model.",
    blocks="model.layers",
    ends={"embedding.word_embeddings": "model.embed_tokens", "final_norm": "model.norm"},
    block={
        "attention_norm": "input_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
        "attention.out": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
)
_GPT2 = _Names(
    prefix="transformer.",
    blocks="transformer.h",
    ends={
        "embedding.word_embeddings": "transformer.wte",
        "embedding.position_embeddings": "transformer.wpe",
        "final_norm": "transformer.ln_f",
    },
    block={
        "attention_norm": "ln_1",
        "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    fused_qkv="attn.c_attn",
    conv1d=True,
)
_GPT_NEOX = _Names(
    prefix="gpt_neox.",
    blocks="gpt_neox.layers",
    ends={"embedding.word_embeddings": "gpt_neox.embed_in", "final_norm": "gpt_neox.final_layer_norm"},
    block={
        "attention_norm": "input_layernorm",
        "attention.out": "attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    fused_qkv="attention.query_key_value",
    head="embed_out",  # transformers 5 says lm_head inside, and writes and reads embed_out as all before it
)
_BERT_BLOCK = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.out": "attention.output.dense",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
}
_BERT = _Names(
    prefix="bert.",
    blocks="bert.encoder.layer",
    ends={
        "embedding.word_embeddings": "bert.embeddings.word_embeddings",
        "embedding.position_embeddings": "bert.embeddings.position_embeddings",
        "embedding.token_type_embeddings": "bert.embeddings.token_type_embeddings",
        "embedding.norm": "bert.embeddings.LayerNorm",
        "transform.dense": "cls.predictions.transform.dense",
        "transform.norm": "cls.predictions.transform.LayerNorm",
    },
    block={"attention_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm", **_BERT_BLOCK},
    head="cls.predictions.decoder",
    head_bias="cls.predictions.bias",
    aside=("bert.pooler.", "cls.seq_relationship."),  # of whole sequences: next-sentence prediction, classes
)
_MEGATRON_BERT = replace(
    _BERT,
    ends={
        **{ours: theirs for ours, theirs in _BERT.ends.items() if ours != "embedding.norm"},
        "final_norm": "bert.encoder.ln",
    },
    block={"attention_norm": "attention.ln", "mlp_norm": "ln", **_BERT_BLOCK},
)
_QKV = ("attention.query", "attention.key", "attention.value")
# Buffers that older versions of transformers saved beside the weights.
_BUFFERS = (
    ".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias",
    "embeddings.position_ids", "embeddings.token_type_ids",
)  # fmt: skip
_OF_TENSORFLOW = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}  # google-bert's folders


def _names_of(model: ModelConfig) -> _Names:
    own = {
        Family.gpt2: _GPT2, Family.gpt_neox: _GPT_NEOX, Family.bert: _BERT, Family.megatron_bert: _MEGATRON_BERT
    }  # fmt: skip
    return own.get(model.family, _LLAMA)


def stored_tensors(model: ModelConfig) -> dict[str, Stored]:
    """Canonical name -> its place, for every tensor of the model; a tied head has none of its own."""
    names, size = _names_of(model), sizes(model)
    ours = {f"{layer}.weight": Stored(f"{theirs}.weight") for layer, theirs in names.ends.items()}
    for layer, theirs in names.ends.items():
        if layer == "transform.dense" or (layer.endswith("norm") and size.parts.layer_norm):
            ours[f"{layer}.bias"] = Stored(f"{theirs}.bias")
    if names.head_bias is not None:
        ours["transform.vocabulary.bias"] = Stored(names.head_bias)
    if not model.tie_word_embeddings:
        ours["head.weight"] = Stored(f"{names.head}.weight")
    for index in range(model.num_layers):
        for layer, leaf in _block_tensors(size):
            ours[f"blocks.{index}.{layer}.{leaf}"] = _in_block(names, index, layer, leaf, size)
    return ours


def _block_tensors(size: Sizes) -> list[tuple[str, str]]:
    """(layer, weight or bias) of each canonical tensor of a block."""
    parts = size.parts
    biased = {
        "attention_norm": parts.layer_norm,
        **dict.fromkeys(_QKV, parts.qkv_bias),
        **(dict.fromkeys(("attention.query_norm", "attention.key_norm"), False) if parts.qk_norm else {}),
        "attention.out": parts.out_bias,
        "mlp_norm": parts.layer_norm,
        **({"mlp.gate": parts.mlp_bias} if parts.gated else {}),
        "mlp.up": parts.mlp_bias,
        "mlp.down": parts.mlp_bias,
    }
    return [(layer, leaf) for layer, bias in biased.items() for leaf in ("weight", "bias")[: 1 + bias]]


def _in_block(names: _Names, index: int, layer: str, leaf: str, size: Sizes) -> Stored:
    at = f"{names.blocks}.{index}"
    transposed = names.conv1d and leaf == "weight" and not layer.endswith("norm")
    if names.fused_qkv is None or layer not in _QKV:
        return Stored(f"{at}.{names.block[layer]}.{leaf}", transposed)
    turn = 0 if names.conv1d else size.head_dim
    return Stored(f"{at}.{names.fused_qkv}.{leaf}", transposed, _QKV.index(layer), len(_QKV), turn)


def head_name(model: ModelConfig) -> str:
    """Of the output head's weight, whether or not it is a tensor of its own."""
    return f"{_names_of(model).head}.weight"


def embedding_name(model: ModelConfig) -> str:
    return f"{_names_of(model).ends['embedding.word_embeddings']}.weight"


def copies_in_folder(model: ModelConfig) -> dict[str, str]:
    """Tensors that a folder may hold beside the one that they are tied to: their names, and that one's."""
    names = _names_of(model)
    if not model.tie_word_embeddings:
        return {}
    copies = {head_name(model): embedding_name(model)}
    return copies | ({f"{names.head}.bias": names.head_bias} if names.head_bias is not None else {})


def names_in_folder(names: Iterable[str], model: ModelConfig) -> tuple[dict[str, str], list[str]]:
    """(the name of `stored_tensors` -> the folder's name for it, names that are no tensor of this model).

    Known: the base model saved without its prefix (openai-community/gpt2), lm_head for embed_out, TensorFlow's names of
    a norm's weight and bias; buffers of older versions and what belongs to other tasks (neither in the one nor in the
    other). A tied head that has a tensor of its own is among the first.
    """
    family = _names_of(model)
    wanted = {place.name for place in stored_tensors(model).values()} | set(copies_in_folder(model))
    given = [name for name in names if not name.endswith(_BUFFERS) and not name.startswith(family.aside)]
    bare = not any(name.startswith(family.prefix) for name in given)
    found: dict[str, str] = {}
    strangers = []
    for name in given:
        ours = head_name(model) if name == "lm_head.weight" else name
        for theirs, known in _OF_TENSORFLOW.items():
            ours = ours.removesuffix(theirs) + known if ours.endswith(theirs) else ours
        if bare and ours != head_name(model):
            ours = family.prefix + ours
        if ours in wanted and ours not in found:
            found[ours] = name
        else:
            strangers.append(name)
    return found, strangers


def tensor_differences(names: Iterable[str], model: ModelConfig) -> list[str]:
    """Why a folder of weights with these tensor names does not hold this model: lines, none where it does."""
    found, strangers = names_in_folder(names, model)
    wanted = {place.name for place in stored_tensors(model).values()}
    lines = []
    if missing := sorted(wanted - set(found)):
        lines.append(f"it has no tensor {missing[0]}" + _and_more(missing))
    if strangers:
        lines.append(f"this model has no tensor {min(strangers)}" + _and_more(strangers))
    return lines


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
