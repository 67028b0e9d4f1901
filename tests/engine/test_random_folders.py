"""Random tiny folders of every family, as transformers saves them: the same logits here, and the same bits back.

Odd vocabularies, heads that are not hidden / heads wide, any rope base and epsilon, biases, windows, tied or not; in
fp32, bf16 and fp16. Tolerance 1e-5 in fp32 with logits of order 1, as in tests/model/test_huggingface.py.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from engine.weights_export import export_weights, open_stored
from engine.weights_import import import_weights
from model.huggingface import load_huggingface_state
from parallel.groups import SINGLE
from parallel.sizes import parameter_count
from tests.model.test_huggingface import build

LENGTH = 20
FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gpt_neox", "bert", "megatron-bert")
KINDS = st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=2, max_size=2)


def rope(draw: Any, **more: Any) -> dict[str, Any]:
    kind = draw(st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn"]))
    scaling: dict[str, Any] = {"rope_type": kind, "rope_theta": draw(st.floats(50.0, 2e6)), **more}
    if kind != "default":
        scaling["factor"] = draw(st.floats(1.1, 16.0))
    if kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = draw(st.sampled_from([8, 16]))
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": draw(st.floats(1.5, 8.0))}
    return scaling


@st.composite
def configs(draw: Any, family: str) -> dict[str, Any]:
    """What AutoConfig.for_model takes."""
    heads = draw(st.sampled_from([1, 2, 4, 6]))
    head_dim = draw(st.sampled_from([8, 12, 16]))
    hidden = heads * draw(st.sampled_from([8, 12, 16]))
    tied, vocab = draw(st.booleans()), draw(st.integers(5, 70))
    shared = dict(vocab_size=vocab, tie_word_embeddings=tied, initializer_range=draw(st.floats(0.01, 0.3)))
    epsilon, width = draw(st.sampled_from([1e-6, 1e-5, 1e-3])), draw(st.integers(3, 60))
    if family == "gpt2":
        return shared | dict(
            n_embd=hidden, n_head=heads, n_layer=2, n_positions=32, n_inner=draw(st.sampled_from([None, width])),
            layer_norm_epsilon=epsilon, activation_function=draw(st.sampled_from(["gelu_new", "gelu", "relu", "silu"])),
        )  # fmt: skip
    shared |= dict(
        hidden_size=hidden, num_attention_heads=heads, num_hidden_layers=2, intermediate_size=width,
        max_position_embeddings=32,
    )  # fmt: skip
    if family == "gpt_neox":
        return shared | dict(
            layer_norm_eps=epsilon, use_parallel_residual=draw(st.booleans()), attention_bias=draw(st.booleans()),
            hidden_act=draw(st.sampled_from(["gelu", "gelu_new", "gelu_fast", "relu"])),
            rope_parameters=rope(draw, partial_rotary_factor=draw(st.sampled_from([0.25, 0.5, 1.0]))),
        )  # fmt: skip
    if "bert" in family:
        return shared | dict(
            tie_word_embeddings=True, layer_norm_eps=epsilon, type_vocab_size=draw(st.integers(1, 4)),
            hidden_act=draw(st.sampled_from(["gelu", "gelu_new", "relu", "silu"])),
            pad_token_id=draw(st.integers(0, 4)),
        )  # fmt: skip
    shared |= dict(
        num_key_value_heads=draw(st.sampled_from([n for n in (1, 2, 3, 6) if heads % n == 0])), head_dim=head_dim,
        rms_norm_eps=epsilon, rope_parameters=rope(draw),
    )  # fmt: skip
    window = draw(st.sampled_from([None, 1, 5, 100]))
    if family == "mistral":
        return shared | dict(sliding_window=window)
    if family in ("llama", "qwen3"):
        shared["attention_bias"] = draw(st.booleans())
    if family == "llama":
        return shared | dict(mlp_bias=draw(st.booleans()))
    return shared | dict(
        use_sliding_window=window is not None, sliding_window=window, layer_types=draw(KINDS) if window else None
    )


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6, derandomize=True, phases=[Phase.generate])  # shrinking takes minutes
@given(data=st.data())
def test_a_random_folder_computes_the_same_here_and_comes_back_unchanged(family: str, data: Any) -> None:
    given_config = data.draw(configs(family))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, attn_implementation="eager", **given_config)
    auto = AutoModelForMaskedLM if "bert" in family else AutoModelForCausalLM
    network = auto.from_config(config)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.15)
    network = network.to(dtype)
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours, back = (Path(folder) / name for name in ("theirs", "ours", "back"))
        network.save_pretrained(theirs, max_shard_size="10KB")
        done = import_weights(theirs, ours, ignored=(), say=print)
        assert parameter_count(done.model) == sum(parameter.numel() for parameter in network.parameters())
        state = {name: t for file in (ours / "weights").glob("*.safetensors") for name, t in load_file(file).items()}
        mine = build(done.model, SINGLE, padded_vocab_size=done.model.vocab_size).eval()
        load_huggingface_state(mine, state, model=done.model, tensor=SINGLE)
        tokens = torch.randint(0, done.model.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            # Loaded anew: a cast of a whole model rounds its rotary frequencies too.
            whole = auto.from_pretrained(theirs, dtype=torch.float32, attn_implementation="eager")
            wanted = whole(input_ids=tokens, use_cache=False).logits
            torch.testing.assert_close(mine(tokens), wanted, rtol=1e-5, atol=1e-5)
        export_weights(open_stored(ours), back, dtype=None, max_bytes=10_000, tokenizer=None, say=print)
        before, after = (
            {name: t for file in one.glob("*.safetensors") for name, t in load_file(file).items()}
            for one in (theirs, back)
        )
        assert sorted(before) == sorted(after)
        for name, tensor in before.items():
            assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
        assert json.loads((back / "config.json").read_text()) == json.loads((theirs / "config.json").read_text())
