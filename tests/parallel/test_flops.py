"""Parameter counts against published numbers and transformers, FLOPs against published formulas."""

from __future__ import annotations

import pytest

from conf.schema import Family, ModelConfig
from parallel.flops import (
    hardware_flops_per_token,
    mfu,
    model_flops_per_step,
    model_flops_per_token,
    tokens_per_s,
    tokens_per_s_per_device,
    tokens_per_step,
    utilisation,
)
from parallel.sizes import block_parameters, parameter_count
from tests.parallel.configs import tiny


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 180_800),
        ({"model__tie_word_embeddings": True}, 164_416),
        ({"model__num_key_value_heads": 4}, 197_184),
        ({"model__vocab_size": 259}, 180_800 + 3 * 64 * 2),
    ],
)
def test_the_tiny_models_have_the_parameters_measured_with_transformers(changes, count):
    assert parameter_count(tiny(**changes).model) == count  # case H1


def test_a_gpt2_has_the_parameters_of_transformers():
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=128, n_embd=64, n_layer=3, n_head=4))
    ours = ModelConfig(
        name="x", family=Family.gpt2, vocab_size=300, hidden_size=64, num_layers=3, num_attention_heads=4,
        max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    assert parameter_count(ours) == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shards_add_up_to_the_whole_with_replicas_and_replicated_key_value_heads_counted_once(tp):
    model = tiny().model
    whole, shard = block_parameters(model), block_parameters(model, tp=tp)
    extra = 2 * max(0, tp - 2) * 16 * 64  # key and value: 2 heads of 16 held by tp ranks, one each
    assert tp * shard.sharded == whole.sharded + extra and shard.replicated == whole.replicated


def gpt(layers: int, hidden: int, vocab: int = 51200) -> ModelConfig:
    return ModelConfig(
        name="gpt", family=Family.gpt2, vocab_size=vocab, hidden_size=hidden, num_layers=layers,
        num_attention_heads=hidden // 128, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip


@pytest.mark.parametrize(("layers", "hidden"), [(24, 2304), (96, 12288), (128, 25600)])
def test_flops_of_a_step_are_megatrons_formula(layers, hidden):
    batch, s, vocab = 512, 2048, 51200
    # arXiv:2104.04473 appendix: 96 B s l h^2 (1 + s/6h + V/16lh) with full recomputation; 72 and V/12lh without.
    without = 72 * batch * s * layers * hidden**2 * (1 + s / (6 * hidden) + vocab / (12 * layers * hidden))
    recomputed = 96 * batch * s * layers * hidden**2 * (1 + s / (6 * hidden) + vocab / (16 * layers * hidden))
    model = gpt(layers, hidden)
    assert model_flops_per_step(model, s, global_batch_size=batch) == pytest.approx(without, rel=1e-12)
    hardware = batch * s * hardware_flops_per_token(model, s, recompute="full")
    assert hardware == pytest.approx(recomputed, rel=1e-12)


def test_the_causal_convention_halves_attention_scores_only():
    model = tiny().model
    whole, causal = model_flops_per_token(model, 32), model_flops_per_token(model, 32, causal=True)
    assert whole - causal == 3 * 4 * (4 * 32 * 64) // 2


def test_berts_have_the_parameters_of_transformers_and_their_head_and_all_scores_count():
    from transformers import BertConfig, BertForMaskedLM, MegatronBertConfig, MegatronBertForMaskedLM

    sizes = dict(vocab_size=300, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96)
    for family, config, network in (
        (Family.bert, BertConfig, BertForMaskedLM),
        (Family.megatron_bert, MegatronBertConfig, MegatronBertForMaskedLM),
    ):
        theirs = network(config(max_position_embeddings=128, type_vocab_size=3, **sizes))
        ours = ModelConfig(
            name="x", family=family, vocab_size=300, hidden_size=64, num_layers=3, num_attention_heads=4,
            ffn_hidden_size=96, max_position_embeddings=128, type_vocab_size=3, tie_word_embeddings=True,
        )  # fmt: skip
        assert parameter_count(ours) == sum(p.numel() for p in theirs.parameters())
        block = 2 * (4 * 64 * 64 + 2 * 64 * 96) + 4 * 32 * 64
        head = 2 * 64 * (64 + 300)  # the dense layer before the logits, and they
        for causal in (False, True):  # there is no mask to leave a half
            assert model_flops_per_token(ours, 32, causal=causal) == 3 * (3 * block + head)


def test_recomputation_leaves_mfu_alone_and_raises_hfu_by_a_third():
    # Head excluded, full recomputation repeats a third of forward + backward: HFU x 4/3 (case H4).
    model = tiny().model
    head = 3 * 2 * 64 * 256
    plain, full = (hardware_flops_per_token(model, 32, recompute=mode) for mode in ("none", "full"))
    assert plain == model_flops_per_token(model, 32)
    assert (full - head) * 3 == (plain - head) * 4


def test_mfu_is_the_formula_over_the_peak_and_absent_without_one():
    model = tiny().model
    setting = dict(global_batch_size=4, step_time_s=1.0, world_size=1)
    flops = 4 * 32 * model_flops_per_token(model, 32)
    assert mfu(model, 32, peak_flops=1e12, **setting) == flops / 1e12
    assert mfu(model, 32, peak_flops=None, **setting) is None
    assert utilisation(8e12, step_time_s=2.0, world_size=4, peak_flops=2e12) == 0.5


def test_tensor_and_pipeline_ranks_do_not_multiply_tokens():
    batch = dict(micro_batch_size=2, num_micro_batches=4, sequence_length=32)
    assert tokens_per_step(data_parallel_size=1, **batch) == 256  # case H2: dp 1 x tp 2
    assert tokens_per_step(data_parallel_size=2, **batch) == 512
    assert tokens_per_s(256, step_time_s=1.0) == 256
    assert tokens_per_s_per_device(256, step_time_s=1.0, world_size=2) == 128
