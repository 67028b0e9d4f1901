"""config.json as a model: what transformers' own classes mean by it, both ways, and everything else refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from conf.cli import compose_config
from conf.huggingface import READERS, model_of, read_config
from conf.huggingface_config import FREE, huggingface_config, model_differences
from conf.knobs import options
from conf.load import ConfigError, to_plain
from conf.model_folders import model_yaml
from conf.schema import ModelConfig
from tests.model.reference import small_model
from tests.model.test_huggingface import CASES, their_config

# As the publishers have them on huggingface.co, keys without effect left out here and there; which preset each is.
PUBLISHED: dict[str, dict[str, Any]] = {
    "mistral_7b": {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "qwen2_5_7b": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
        "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28,
        "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False,
        "use_sliding_window": False, "vocab_size": 152064,
    },
    "qwen3_8b": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
        "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32,
        "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "pythia_6_9b": {
        "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 16384, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 32,
        "num_hidden_layers": 32, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
        "use_parallel_residual": True, "vocab_size": 50432,
    },
    "llama_1b": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000, "head_dim": 64,
        "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
        "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256,
    },
    "bert_110m": {
        "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
        "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert",
        "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0, "position_embedding_type": "absolute",
        "transformers_version": "4.6.0.dev0", "type_vocab_size": 2, "use_cache": True, "vocab_size": 30522,
    },
    "gpt2_125m": {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_type": "cls_index",
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_config_that_transformers_writes_is_read_as_the_model_it_was_made_of(case: str) -> None:
    model = small_model(**CASES[case])
    read = model_of(their_config(model).to_dict() | {"architectures": None}, name="x")
    assert model_differences(read, model) == []


@pytest.mark.parametrize("case", CASES)
def test_transformers_builds_the_same_model_from_ours(case: str, tmp_path: Path) -> None:
    model = small_model(**CASES[case])
    (tmp_path / "config.json").write_text(json.dumps(huggingface_config(model)))
    built, wanted = AutoConfig.from_pretrained(tmp_path).to_dict(), their_config(model).to_dict()
    aside = {"bos_token_id", "eos_token_id", "architectures", "dtype", "transformers_version", "max_window_layers"}
    aside |= {"_name_or_path", "classifier_dropout"} | ({"n_inner"} if model.ffn_hidden_size is None else set())
    if model.sliding_window is None:
        aside |= {"sliding_window"}
    different = {key for key in wanted if key not in aside and built.get(key) != wanted[key]}
    rope = different & {"rope_parameters"}
    for one in (built, wanted) if rope else ():  # defaults that only one of them names
        one["rope_parameters"].setdefault("original_max_position_embeddings", model.max_position_embeddings)
    assert {key: (built.get(key), wanted[key]) for key in different if built.get(key) != wanted[key]} == {}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_preset(name: str) -> None:
    read = model_of(PUBLISHED[name], name=name)
    assert model_differences(read, compose_config([f"model={name}"]).model) == []


@pytest.mark.parametrize("name", options()["model"])
def test_every_preset_survives_its_own_config_and_yaml(name: str, tmp_path: Path) -> None:
    model = compose_config([f"model={name}"]).model
    read = model_of(huggingface_config(model), name="again")
    assert model_differences(read, model) == []
    assert model_differences(model_of(huggingface_config(read), name="x"), read) == []
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "again.yaml").write_text(model_yaml(read, comment="two\nlines"))
    assert to_plain(compose_config(["model=again"], config_dir=str(tmp_path)).model) == to_plain(read)


@pytest.mark.parametrize("kind", READERS)
def test_keys_that_are_left_out_have_the_values_that_transformers_gives_them(kind: str) -> None:
    whole = AutoConfig.for_model(kind).to_dict() | {"architectures": None}
    assert model_differences(model_of({"model_type": kind}, name="x"), model_of(whole, name="x")) == []


BERT = {"model_type": "bert", "vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
LLAMA = {"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"model_type": "mixtral"}, 'model_type="mixtral" is not supported; supported: gpt2, llama'),
        ({}, "model_type=null is not supported"),
        (BERT | {"is_decoder": True}, "is_decoder=true is not supported; false is"),
        (BERT | {"add_cross_attention": True}, "add_cross_attention is not supported"),
        (BERT | {"position_embedding_type": "relative_key"}, 'position_embedding_type="relative_key" is not supported'),
        (BERT | {"architectures": ["BertForQuestionAnswering"]}, 'architectures=["BertForQuestionAnswering"] is not'),
        (BERT | {"tie_word_embeddings": False}, "model.tie_word_embeddings=false is no choice of model.family=bert"),
        (BERT | {"embedding_size": 8}, "embedding_size is not known, and so may matter"),
        (LLAMA | {"sparse_moe": 1}, "sparse_moe is not known, and so may matter; recipes/convert.py import --ignore"),
        (LLAMA | {"num_local_experts": 8}, "num_local_experts is not supported"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        (LLAMA | {"auto_map": {"AutoModel": "x.Y"}}, "auto_map is not supported"),
        (LLAMA | {"hidden_act": "gelu"}, 'hidden_act="gelu" is not supported; "silu" is'),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, 'architectures=["LlamaForSequence'),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "rope_type=longrope is not known"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "rope_type=linear lacks factor"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2, "alpha": 3}}, "rope_scaling.alpha is no key"),
        (LLAMA | {"rope_parameters": {"full_attention": {}}}, "rope_parameters for each kind of layer"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported for model_type=llama"),
        (LLAMA | {"sliding_window": 8}, "sliding_window is not known"),
        (LLAMA | {"hidden_size": "wide"}, 'hidden_size="wide" is not a number'),
        (LLAMA | {"num_hidden_layers": 1.5}, "num_hidden_layers=1.5 is not a whole number"),
        (LLAMA | {"tie_word_embeddings": "yes"}, 'tie_word_embeddings="yes" is neither true nor false'),
        ({"model_type": "mistral", "layer_types": []}, "layer_types is not known"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=true is"),
        ({"model_type": "gpt2", "reorder_and_upcast_attn": True}, "reorder_and_upcast_attn=true is not supported"),
        ({"model_type": "gpt2", "scale_attn_weights": False}, "scale_attn_weights=false is not supported"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention is not supported"),
        ({"model_type": "gpt2", "embd_pdrop": 0.3}, "embd_pdrop=0.3 and resid_pdrop=0.1 differ"),
        ({"model_type": "gpt2", "activation_function": "tanh"}, 'activation_function="tanh" is not supported'),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "num_hidden_layers": 1, "layer_types": ["chunked"]},
            "model.layer_types has chunked",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError) as raised:
        model_of(config, name="x")
    assert any(one.startswith(line) or line in one for one in str(raised.value).splitlines()), raised.value


def test_everything_wrong_is_said_at_once_and_an_ignored_key_is_not() -> None:
    config = LLAMA | {"hidden_act": "relu", "mystery": 1, "is_encoder_decoder": True}
    with pytest.raises(ValueError) as raised:
        model_of(config, name="x")
    assert len(str(raised.value).splitlines()) == 3
    assert model_of(LLAMA | {"mystery": 1}, name="x", ignored=["mystery"]).hidden_size == 64


def test_dropout_is_kept(tmp_path: Path) -> None:
    model = model_of(PUBLISHED["gpt2_125m"], name="x")
    assert (model.hidden_dropout, model.attention_dropout) == (0.1, 0.1)
    assert huggingface_config(model)["attn_pdrop"] == 0.1


def test_a_folder_stands_for_a_model_on_the_command_line(tmp_path: Path) -> None:
    folder = tmp_path / "Some Model-1B"
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / "config.json").write_text(json.dumps(PUBLISHED["llama_1b"]))
    whole = compose_config(["model.rope_theta=7", f"model={folder}", "train.lr=1"])
    expected = ModelConfig(**(vars(model_of(PUBLISHED["llama_1b"], name="some_model_1b")) | {"rope_theta": 7.0}))
    assert whole.model == expected and whole.train.lr == 1
    assert compose_config([f"model={folder / 'weights' / 'config.json'}"]).model.name == "some_model_1b"


def test_a_folder_that_is_no_model_is_one_line_with_its_name(tmp_path: Path) -> None:
    for content, line in (("{", "is not JSON"), ('{"model_type": "t5"}', 'model_type="t5" is not supported')):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError) as raised:
            compose_config([f"model={tmp_path}"])
        assert all(one.startswith(f"model={tmp_path}: ") for one in raised.value.problems)
        assert line in raised.value.problems[0]
    with pytest.raises(ConfigError, match=r"does not exist; name a folder with a config\.json, or an option"):
        compose_config(["model=./nothing"])


def test_the_knobs_left_out_of_a_comparison_are_those_of_training_and_labels() -> None:
    assert set(FREE) <= set(vars(ModelConfig())) and "rope_theta" not in FREE


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json cannot be read: No such file"):
        read_config(tmp_path)
