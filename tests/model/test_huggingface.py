"""The Transformer against transformers' own models with the same random weights: logits and every gradient.

Tolerance 1e-5 in fp32 with values of order 1: about a hundred roundings of 6e-8.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MegatronBertConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from conf.schema import Activation, Family, ModelConfig
from model.huggingface import from_huggingface_state, load_huggingface_state, to_huggingface_state
from model.huggingface_names import names_in_folder, stored_tensors, tensor_differences
from model.layers import Transformer, build_layer_specs
from model.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from model.tensor_parallel.parameter import count_parameters
from model.tensor_parallel.random import RandomStreams
from parallel.architecture import BIDIRECTIONAL
from parallel.groups import SINGLE, AxisGroup
from tests.model.reference import gather_gradients, infos_of, small_model
from tests.ranks import run_ranks, tensor_axis

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 4.0}
GPT2 = dict(family=Family.gpt2, num_key_value_heads=None)
NEOX = dict(family=Family.gpt_neox, num_key_value_heads=None)
MISTRAL, QWEN2, QWEN3 = (dict(family=family) for family in (Family.mistral, Family.qwen2, Family.qwen3))
BERT = dict(num_key_value_heads=None, tie_word_embeddings=True, norm_epsilon=1e-12)
SOME = ["full_attention", "sliding_attention"]
CASES: dict[str, dict[str, Any]] = {
    "gpt2": dict(**GPT2, tie_word_embeddings=True, ffn_hidden_size=None),
    "gpt2 untied, narrow ffn, relu": dict(**GPT2, ffn_hidden_size=96, activation=Activation.relu),
    "llama gqa": dict(num_key_value_heads=2),
    "llama mqa, tied": dict(num_key_value_heads=1, tie_word_embeddings=True),
    "llama mha, wide heads": dict(num_key_value_heads=4, head_dim=24),
    "llama rope llama3": dict(rope_scaling=LLAMA3),
    "llama rope linear": dict(rope_scaling={"rope_type": "linear", "factor": 4.0}, rope_theta=500.0),
    "llama rope yarn": dict(rope_scaling=YARN, rope_theta=1e6),
    "llama rope yarn, its own scale": dict(rope_scaling=YARN | {"attention_factor": 0.7, "truncate": False}),
    "llama rope dynamic": dict(rope_scaling={"rope_type": "dynamic", "factor": 1.7}),
    "llama biases": dict(attention_bias=True, mlp_bias=True, norm_epsilon=1e-3),
    "mistral, window of 5, wide heads": dict(**MISTRAL, sliding_window=5, head_dim=24),
    "mistral, no window": dict(**MISTRAL, tie_word_embeddings=True),
    "qwen2": dict(**QWEN2, rope_theta=1e6, tie_word_embeddings=True),
    "qwen2, some windows": dict(**QWEN2, sliding_window=7, layer_types=SOME, num_key_value_heads=1),
    "qwen3": dict(**QWEN3, head_dim=32, norm_epsilon=1e-4),
    "qwen3, biases, windows": dict(**QWEN3, attention_bias=True, sliding_window=3, layer_types=SOME[::-1]),
    "gpt_neox": dict(**NEOX),
    "gpt_neox one after the other, tied": dict(**NEOX, parallel_residual=False, tie_word_embeddings=True),
    "gpt_neox no biases, half a head": dict(
        **NEOX, attention_bias=False, rotary_fraction=0.5, rope_theta=300.0, activation=Activation.gelu_tanh,
        norm_epsilon=1e-3,
    ),
    "bert": dict(family=Family.bert, **BERT),
    "bert, five token types, relu": dict(
        family=Family.bert, type_vocab_size=5, activation=Activation.relu, ffn_hidden_size=96, **BERT
    ),
    "megatron_bert": dict(family=Family.megatron_bert, **BERT),
    "megatron_bert, one token type, gelu_new": dict(
        family=Family.megatron_bert, type_vocab_size=1, activation=Activation.gelu_tanh,
        **(BERT | dict(norm_epsilon=1e-3)),
    ),
}  # fmt: skip


def build(model: ModelConfig, tensor: AxisGroup, sp: bool = False, padded_vocab_size: int = 64) -> Transformer:
    streams = RandomStreams(tensor_rank=tensor.rank)
    specs = build_layer_specs(
        model, tensor=tensor, streams=streams, padded_vocab_size=padded_vocab_size, sequence_parallel=sp,
        recompute="none", mask_documents=False, seed=1,
    )  # fmt: skip
    return Transformer(specs, streams=streams)


def their_config(model: ModelConfig) -> Any:
    """transformers' config of the same model, by hand."""
    head_dim = model.head_dim or model.hidden_size // model.num_attention_heads
    rope = {"rope_theta": model.rope_theta, **(model.rope_scaling or {"rope_type": "default"})}
    shared: dict[str, Any] = dict(
        vocab_size=model.vocab_size, tie_word_embeddings=model.tie_word_embeddings, attn_implementation="eager",
        initializer_range=model.init_std,
    )  # fmt: skip
    if model.family is Family.gpt2:
        return GPT2Config(
            n_positions=model.max_position_embeddings, n_embd=model.hidden_size, n_layer=model.num_layers,
            n_head=model.num_attention_heads, n_inner=model.ffn_hidden_size, layer_norm_epsilon=model.norm_epsilon,
            activation_function="relu" if model.activation else "gelu_new",
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **shared,
        )  # fmt: skip
    shared |= dict(
        hidden_size=model.hidden_size, num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads, intermediate_size=model.ffn_hidden_size,
        max_position_embeddings=model.max_position_embeddings,
    )  # fmt: skip
    if model.family in BIDIRECTIONAL:
        kind = BertConfig if model.family is Family.bert else MegatronBertConfig
        acts = {Activation.relu: "relu", Activation.gelu_tanh: "gelu_new", None: "gelu"}
        # transformers zeroes the gradient of pad_token_id's row
        return kind(
            hidden_act=acts[model.activation], layer_norm_eps=model.norm_epsilon, pad_token_id=None,
            type_vocab_size=2 if model.type_vocab_size is None else model.type_vocab_size,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **shared,
        )  # fmt: skip
    if model.family is Family.gpt_neox:
        return GPTNeoXConfig(
            hidden_act="gelu_new" if model.activation else "gelu", layer_norm_eps=model.norm_epsilon,
            use_parallel_residual=model.parallel_residual is not False,
            attention_bias=model.attention_bias is not False,
            rope_parameters=rope | {"partial_rotary_factor": model.rotary_fraction or 0.25}, **shared,
        )  # fmt: skip
    shared |= dict(
        num_key_value_heads=model.num_key_value_heads, head_dim=head_dim, rms_norm_eps=model.norm_epsilon,
        rope_parameters=rope,
    )  # fmt: skip
    windows = dict(
        use_sliding_window=model.sliding_window is not None, sliding_window=model.sliding_window,
        layer_types=model.layer_types,
    )  # fmt: skip
    return {
        Family.llama: lambda: LlamaConfig(
            attention_bias=bool(model.attention_bias), mlp_bias=bool(model.mlp_bias), **shared
        ),
        Family.mistral: lambda: MistralConfig(sliding_window=model.sliding_window, **shared),
        Family.qwen2: lambda: Qwen2Config(**windows, **shared),
        Family.qwen3: lambda: Qwen3Config(attention_bias=bool(model.attention_bias), **windows, **shared),
    }[model.family]()


def theirs(model: ModelConfig) -> Any:
    torch.manual_seed(0)
    auto = AutoModelForMaskedLM if model.family in BIDIRECTIONAL else AutoModelForCausalLM
    network = auto.from_config(their_config(model))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
    return network


def as_stored(tensors: dict[str, Any]) -> dict[str, Any]:
    """By the names that transformers writes: GPT-NeoX's head has another within."""
    neox = any(name.startswith("gpt_neox.") for name in tensors)
    return {("embed_out.weight" if neox and name == "lm_head.weight" else name): t for name, t in tensors.items()}


def batch(model: ModelConfig) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, model.vocab_size, (2, 33), generator=torch.Generator().manual_seed(2))
    return tokens[:, :-1], tokens[:, 1:]


@cache
def their_results(case: str) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """State, logits and gradients by transformers' names."""
    network = theirs(small_model(**CASES[case]))
    tokens, labels = batch(small_model(**CASES[case]))
    logits = network(input_ids=tokens, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    gradients = as_stored({name: parameter.grad for name, parameter in network.named_parameters()})
    return as_stored({k: v.detach() for k, v in network.state_dict().items()}), logits.detach(), gradients


def run_ours(n: int, sp: bool, model: ModelConfig, state: dict[str, Tensor]) -> Any:
    tensor = tensor_axis(n)
    network = build(model, tensor, sp)
    load_huggingface_state(network, state, model=model, tensor=tensor)
    tokens, labels = batch(model)
    logits = network(tokens)
    vocab_parallel_cross_entropy(logits, labels, tensor=tensor, vocab_size=model.vocab_size).mean().backward()
    return logits.detach(), [(p.info, p.grad) for p in network.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("n, sp", [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_transformers(case: str, n: int, sp: bool) -> None:
    model = small_model(**CASES[case])
    state, logits, gradients = their_results(case)
    ranks = run_ranks(n, run_ours, n, sp, model, state)
    ours = torch.cat([r[0] for r in ranks], -1)[..., : model.vocab_size]
    torch.testing.assert_close(ours, logits, rtol=0, atol=1e-5)
    our_gradients = to_huggingface_state(gather_gradients([r[1] for r in ranks]), model)
    for name, gradient in gradients.items():
        torch.testing.assert_close(our_gradients[name], gradient, rtol=0, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}")


@pytest.mark.parametrize("case", CASES)
def test_state_survives_the_round_trip_bit_for_bit(case: str) -> None:
    model = small_model(**CASES[case])
    state = as_stored(theirs(model).state_dict())
    back = to_huggingface_state(from_huggingface_state(state, model), model)
    assert sorted(back) == sorted(state)
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize("case", CASES)
def test_parameter_count_is_transformers(case: str) -> None:
    model = small_model(**CASES[case])
    assert count_parameters(infos_of(build(model, SINGLE))) == sum(p.numel() for p in theirs(model).parameters())


def test_a_state_of_another_model_is_refused_by_name() -> None:
    model = small_model()
    state = theirs(model).state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_huggingface_state(build(model, SINGLE), state, model=model, tensor=SINGLE)
    wider = theirs(small_model(ffn_hidden_size=256)).state_dict()
    with pytest.raises(ValueError, match=r"blocks.0.mlp.gate.weight has shape \(256, 64\)"):
        load_huggingface_state(build(model, SINGLE), wider, model=model, tensor=SINGLE)


def test_a_folder_of_another_model_is_told_by_its_names() -> None:
    model = small_model(num_key_value_heads=2)
    names = list(theirs(model).state_dict())
    assert tensor_differences(names, model) == []
    assert tensor_differences([*names, "model.layers.0.self_attn.rotary_emb.inv_freq"], model) == []
    (line,) = tensor_differences([*names, "model.layers.9.mlp.up_proj.weight"], model)
    assert line == "this model has no tensor model.layers.9.mlp.up_proj.weight"
    (line,) = tensor_differences(names[1:], model)
    assert line == f"it has no tensor {names[0]}"


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_that_transformers_saves_has_its_place(case: str, tmp_path: Path) -> None:
    model = small_model(**CASES[case])
    theirs(model).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == {place.name for place in stored_tensors(model).values()}


def test_other_names_of_the_same_tensors_are_known() -> None:
    gpt2 = small_model(**CASES["gpt2"])
    bare = [name.removeprefix("transformer.") for name in theirs(gpt2).state_dict() if name != "lm_head.weight"]
    found, strangers = names_in_folder([*bare, "h.0.attn.bias", "h.1.attn.masked_bias"], gpt2)
    assert found["transformer.h.0.attn.c_attn.bias"] == "h.0.attn.c_attn.bias" and not strangers
    assert tensor_differences(bare, gpt2) == []
    neox = small_model(**CASES["gpt_neox"])
    names = list(theirs(neox).state_dict())
    assert "lm_head.weight" in names and tensor_differences(names, neox) == []
    assert tensor_differences(as_stored(dict.fromkeys(names)), neox) == []
    (line,) = tensor_differences([*names, "embed_out.weight"], neox)
    assert line == "this model has no tensor embed_out.weight"
