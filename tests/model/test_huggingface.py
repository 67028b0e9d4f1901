"""The Transformer against transformers' own models with the same random weights: logits and every gradient.

Tolerance 1e-5 in fp32 with values of order 1: about a hundred roundings of 6e-8.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from conf.schema import Family, ModelConfig
from model.huggingface import differences_from, from_huggingface_state, load_huggingface_state, to_huggingface_state
from model.layers import Transformer, build_layer_specs
from model.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from model.tensor_parallel.parameter import count_parameters
from model.tensor_parallel.random import RandomStreams
from parallel.groups import SINGLE, AxisGroup
from tests.model.reference import gather_gradients, infos_of, small_model
from tests.ranks import run_ranks, tensor_axis

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "gpt2": dict(family=Family.gpt2, num_key_value_heads=None, tie_word_embeddings=True, ffn_hidden_size=None),
    "gpt2 untied, narrow ffn": dict(family=Family.gpt2, num_key_value_heads=None, ffn_hidden_size=96),
    "llama gqa": dict(num_key_value_heads=2),
    "llama mqa, tied": dict(num_key_value_heads=1, tie_word_embeddings=True),
    "llama mha, wide heads": dict(num_key_value_heads=4, head_dim=24),
    "llama rope llama3": dict(rope_scaling=LLAMA3),
    "llama rope linear": dict(rope_scaling={"rope_type": "linear", "factor": 4.0}, rope_theta=500.0),
}


def build(model: ModelConfig, tensor: AxisGroup, sp: bool = False, padded_vocab_size: int = 64) -> Transformer:
    streams = RandomStreams(tensor_rank=tensor.rank)
    specs = build_layer_specs(
        model, tensor=tensor, streams=streams, padded_vocab_size=padded_vocab_size, sequence_parallel=sp,
        recompute="none", mask_documents=False, seed=1,
    )  # fmt: skip
    return Transformer(specs, streams=streams)


def theirs(model: ModelConfig) -> Any:
    torch.manual_seed(0)
    if model.family == Family.gpt2:
        config = GPT2Config(
            vocab_size=model.vocab_size, n_positions=model.max_position_embeddings, n_embd=model.hidden_size,
            n_layer=model.num_layers, n_head=model.num_attention_heads, n_inner=model.ffn_hidden_size,
            layer_norm_epsilon=model.norm_epsilon, tie_word_embeddings=model.tie_word_embeddings,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager",
        )  # fmt: skip
        network: Any = GPT2LMHeadModel(config)
    else:
        network = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=model.vocab_size,
                hidden_size=model.hidden_size,
                num_hidden_layers=model.num_layers,
                num_attention_heads=model.num_attention_heads,
                num_key_value_heads=model.num_key_value_heads,
                head_dim=model.head_dim or model.hidden_size // model.num_attention_heads,
                intermediate_size=model.ffn_hidden_size,
                max_position_embeddings=model.max_position_embeddings,
                rms_norm_eps=model.norm_epsilon,
                tie_word_embeddings=model.tie_word_embeddings,
                rope_parameters={"rope_theta": model.rope_theta, **(model.rope_scaling or {"rope_type": "default"})},
                attn_implementation="eager",
            )
        )
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
    return network


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
    gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
    return {k: v.detach() for k, v in network.state_dict().items()}, logits.detach(), gradients


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
    state = theirs(model).state_dict()
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


def test_a_folder_of_another_model_is_told_by_config_and_names() -> None:
    model = small_model(num_key_value_heads=2)
    whole = theirs(model)
    names, config = list(whole.state_dict()), whole.config.to_dict()
    assert differences_from(names, config, model) == []
    assert differences_from(names, {}, model) == []
    assert differences_from([*names, "model.layers.0.self_attn.rotary_emb.inv_freq"], config, model) == []
    (line,) = differences_from([*names, "model.layers.9.mlp.up_proj.weight"], config, model)
    assert line == "this model has no tensor model.layers.9.mlp.up_proj.weight"
    (line,) = differences_from(names[1:], config, model)
    assert line == f"it has no tensor {names[0]}"
    (line,) = differences_from(names, config | {"rms_norm_eps": 1e-3}, model)
    assert line == "rms_norm_eps is 0.001 there and 1e-05 here"
    old = {key: value for key, value in config.items() if key != "rope_parameters"} | {"rope_theta": 5e5}
    assert differences_from(names, old, model) == ["rope_theta is 500000.0 there and 10000.0 here"]


@pytest.mark.parametrize("case", CASES)
def test_the_config_is_the_one_that_transformers_writes(case: str) -> None:
    model = small_model(**CASES[case])
    whole = theirs(model)
    assert differences_from(list(whole.state_dict()), whole.config.to_dict(), model) == []
