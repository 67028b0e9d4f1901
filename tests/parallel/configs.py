"""Configs that the tests of parallel/ start from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from conf.schema import ClusterConfig, Config, DataConfig, Family, LinkConfig, ModelConfig, RatesConfig


def tiny(**changes: Any) -> Config:
    """A Llama of 180 800 parameters; `changes` as group__field=value."""
    config = Config(
        model=ModelConfig(
            name="tiny",
            vocab_size=256,
            hidden_size=64,
            num_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            ffn_hidden_size=128,
        ),
        data=DataConfig(sequence_length=32, mask_documents=False),
    )
    return changed(config, **changes)


def gpt(*, layers: int, hidden: int, heads: int, **changes: Any) -> Config:
    """A GPT of arXiv:2205.05198 table 3: sequence 2048, vocabulary 51200, dropout, 16 bit."""
    config = Config(
        model=ModelConfig(
            name="gpt",
            family=Family.gpt2,
            vocab_size=51200,
            hidden_size=hidden,
            num_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            hidden_dropout=0.1,
            attention_dropout=0.1,
        ),
        data=DataConfig(sequence_length=2048, mask_documents=False),
    )
    return changed(config, **{"precision__dtype": "bf16", **changes})


def changed(config: Config, **changes: Any) -> Config:
    """The same object with fields set, strings turned into the field's Enum."""
    for key, value in changes.items():
        group, _, name = key.partition("__")
        section, name = (getattr(config, group), name) if name else (config, group)
        assert hasattr(section, name), key
        kind = type(getattr(section, name))
        setattr(section, name, kind(value) if isinstance(value, str) else value)
    return config


def measured_cluster(**changes: Any) -> ClusterConfig:
    """Of one node, with links and rates, so that times can be predicted."""
    rates = RatesConfig(
        matrix_flops=2e10, operand_bandwidth=5e9, attention_flops=1e10, memory_bandwidth=5e9, kernel_s=1e-5
    )
    link = LinkConfig("loopback", bandwidth=5e8, latency_s=2e-4)
    return replace(ClusterConfig(name="measured", intra_node=link, rates=rates), **changes)
