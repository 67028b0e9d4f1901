"""Each refusal of a plan, by its message; and that all of them come at once."""

from __future__ import annotations

import time

import pytest

from parallel.plan import ParallelPlan, PlanError
from tests.parallel.configs import tiny


def refusals(*, world: int = 1, device: str | None = None, **changes) -> tuple[str, ...]:
    with pytest.raises(PlanError) as raised:
        ParallelPlan.from_config(tiny(**changes), world, device=device)
    return raised.value.problems


BERT = dict(model__family="bert", model__num_key_value_heads=None, model__tie_word_embeddings=True)
SIXTEEN_HEADS = dict(model__num_attention_heads=16, model__num_key_value_heads=None, model__head_dim=8)

CASES = {
    "heads": (
        dict(world=3, parallel__tp=3, train__global_batch_size=9, model__ffn_hidden_size=96, **SIXTEEN_HEADS),
        "parallel.tp=3 does not divide model.num_attention_heads=16; use 1, 2, 4, 8 or 16",
    ),
    "feed-forward": (
        dict(world=4, parallel__tp=4, model__ffn_hidden_size=126),
        "parallel.tp=4 does not divide model.ffn_hidden_size=126; use 1 or 2",
    ),
    "key-value heads": (
        dict(world=4, parallel__tp=4, model__num_attention_heads=12, model__num_key_value_heads=6),
        "parallel.tp=4 and model.num_key_value_heads=6: one must divide the other; use tp 1, 2, 3, 6 or 12",
    ),
    "key-value heads of heads": (
        dict(model__num_key_value_heads=3),
        "model.num_key_value_heads=3 does not divide model.num_attention_heads=4; use 1, 2 or 4",
    ),
    "heads of hidden": (
        dict(model__hidden_size=66, model__head_dim=None),
        "model.num_attention_heads=4 does not divide model.hidden_size=66; use a divisor or set model.head_dim",
    ),
    "odd heads": (
        dict(model__head_dim=15),
        "model.head_dim=15 is odd, and rotary positions turn pairs; use an even size",
    ),
    "layers": (
        dict(world=8, parallel__pp=8),
        "model.num_layers=4 is less than the 8 stages of parallel.pp=8; use parallel.pp of at most 4",
    ),
    "layers of a V": (
        dict(world=4, parallel__pp=4, parallel__schedule="dualpipev"),
        "model.num_layers=4 is less than the 8 stages of parallel.pp=4 (dualpipev: two stages a rank); "
        "use parallel.pp of at most 2",
    ),
    "stages by hand, how many": (
        dict(world=2, parallel__pp=2, parallel__stages=[1, 1, 2]),
        "parallel.stages=[1, 1, 2] names 3 stages, the plan has 2; give 2 numbers",
    ),
    "stages by hand, sum": (
        dict(world=2, parallel__pp=2, parallel__stages=[1, 2]),
        "parallel.stages=[1, 2] adds up to 3 blocks but model.num_layers=4; give numbers that add up to 4",
    ),
    "stages by hand, empty": (
        dict(world=2, parallel__pp=2, parallel__stages=[0, 4]),
        "parallel.stages=[0, 4] leaves a stage without a block; give each at least 1",
    ),
    "positions": (
        dict(data__sequence_length=2048),
        "data.sequence_length=2048 is longer than model.max_position_embeddings=1024; use at most 1024",
    ),
    "sequence parallel": (
        dict(world=2, parallel__tp=2, parallel__sequence_parallel=True, data__sequence_length=31),
        "parallel.sequence_parallel splits data.sequence_length=31, which parallel.tp=2 does not divide; "
        "use a length of 30 or 32, or parallel.sequence_parallel=false",
    ),
    "ZeRO-2 and stages": (
        dict(world=2, parallel__pp=2, zero__stage=2),
        "zero.stage=2 does not go with parallel.pp=2 (the pipeline engine accumulates whole gradients); "
        "use zero=stage0 or zero=stage1, or parallel.pp=1",
    ),
    "ZeRO-3 and stages": (
        dict(world=2, parallel__pp=2, zero__stage=3),
        "zero.stage=3 does not go with parallel.pp=2 (the pipeline engine accumulates whole gradients); "
        "use zero=stage0 or zero=stage1, or parallel.pp=1",
    ),
    "offload without ZeRO": (
        dict(zero__stage=0, zero__offload_optimizer=True),
        "zero.offload_optimizer=true needs ZeRO but zero.stage=0; use zero=stage1, stage2 or stage3",
    ),
    "fp16 on CPU": (
        dict(device="cpu", precision__dtype="fp16"),
        "precision.dtype=fp16 is not supported on CPU; use precision=bf16 or precision=fp32",
    ),
    "fp16 without ZeRO": (
        dict(device="cuda", zero__stage=0, precision__dtype="fp16"),
        "precision.dtype=fp16 needs ZeRO, which keeps its master weights, but zero.stage=0; use zero=stage1",
    ),
    "bf16 without ZeRO": (
        dict(zero__stage=0, precision__dtype="bf16"),
        "precision.dtype=bf16 with precision.grad_accum_dtype=fp32 needs ZeRO but zero.stage=0; "
        "use zero=stage1, or precision.grad_accum_dtype=bf16",
    ),
    "accumulation narrower than weights": (
        dict(precision__grad_accum_dtype="bf16"),
        "precision.grad_accum_dtype=bf16 does not go with precision.dtype=fp32; use fp32",
    ),
    "two 16-bit formats": (
        dict(precision__dtype="bf16", precision__grad_accum_dtype="fp16"),
        "precision.grad_accum_dtype=fp16 does not go with precision.dtype=bf16; use fp32 or bf16",
    ),
    "world": (
        dict(world=6, parallel__tp=2, parallel__pp=2),
        "6 ranks run, not a multiple of parallel.tp=2 x parallel.pp=2 = 4; start 4 or 8 ranks "
        "(deepspeed --num_gpus N), or use degrees whose product divides 6",
    ),
    "world of one": (
        dict(world=1, parallel__tp=2),
        "1 rank runs, not a multiple of parallel.tp=2 x parallel.pp=1 = 2; start 2 ranks "
        "(deepspeed --num_gpus N), or use degrees whose product divides 1",
    ),
    "unused devices": (
        dict(world=8, cluster__nodes=2, cluster__devices_per_node=8),
        "8 ranks run but cluster.nodes=2 x cluster.devices_per_node=8 = 16 devices; start 16 ranks or set the "
        "numbers of this cluster",
    ),
    "global batch": (
        dict(world=3, train__micro_batch_size=2, train__global_batch_size=8),
        "train.global_batch_size=8 is not a multiple of train.micro_batch_size=2 x data-parallel size 3 = 6; "
        "use 6 or 12",
    ),
    "too few micro-batches for a V": (
        dict(world=2, parallel__pp=2, parallel__schedule="dualpipev", train__global_batch_size=3),
        "parallel.schedule=dualpipev needs 4 micro-batches (2 x parallel.pp=2) but a batch of 3 samples has 3; "
        "use train.global_batch_size of at least 4, a smaller train.micro_batch_size, or parallel.schedule=1f1b",
    ),
    "too few micro-batches for a V at the start of a ramp": (
        dict(world=2, parallel__pp=2, parallel__schedule="dualpipev", train__batch_ramp_up=[2, 2, 60]),
        "parallel.schedule=dualpipev needs 4 micro-batches (2 x parallel.pp=2) but a batch of 2 samples has 2; "
        "use train.global_batch_size of at least 4, a smaller train.micro_batch_size, or parallel.schedule=1f1b",
    ),
    "bidirectional and the next token": (
        dict(objective="clm", **BERT),
        "model.family=bert sees what comes after a token, which objective=clm asks for; use objective=mlm, or a causal "
        "model",
    ),
    "causal and masks": (
        dict(objective="mlm"),
        "objective=mlm needs a model that sees both ways, but model.family=llama is causal; use model.family=bert or "
        "megatron_bert (model=megatron_bert_336m), or objective=clm",
    ),
    "masks and conversations": (
        dict(objective="mlm", data__format="conversations", **BERT),
        "data.format=conversations is learnt answer by answer, which objective=mlm is not; use data.format=text, or a "
        "causal model",
    ),
    "masks and a sample": (
        dict(objective="mlm", train__sample_tokens=5, **BERT),
        "train.sample_tokens=5 continues a text, which model.family=bert does not: it fills in masks; set "
        "train.sample_tokens=0",
    ),
    "masks and adapters": (
        dict(objective="mlm", lora__rank=4, **BERT),
        "lora.rank=4 adapts causal models, but model.family=bert; set lora.rank=0, which trains all weights",
    ),
    "BERT's head is tied": (
        dict(objective="mlm", **(BERT | dict(model__tie_word_embeddings=False))),
        "model.tie_word_embeddings=false is no choice of model.family=bert, whose head is the word table and a bias; "
        "set it to true",
    ),
    "BERT's heads": (
        dict(objective="mlm", **(BERT | dict(model__num_key_value_heads=2))),
        "model.num_key_value_heads=2: model.family=bert has as many as model.num_attention_heads=4; leave it null",
    ),
    "token types": (
        dict(model__type_vocab_size=2),
        "model.type_vocab_size=2 is no choice of model.family=llama; leave it null, or use bert, megatron_bert",
    ),
    "a V of one stage": (
        dict(parallel__schedule="dualpipev"),
        "parallel.schedule=dualpipev needs parallel.pp of 2 or more, not 1; use parallel.schedule=1f1b",
    ),
    "ramp-up, shape": (
        dict(train__batch_ramp_up=[2, 2]),
        "train.batch_ramp_up=[2, 2] is not [first batch size, increment, samples], all positive; "
        "give three such numbers",
    ),
    "ramp-up, start": (
        dict(train__batch_ramp_up=[8, 2, 60]),
        "train.batch_ramp_up=[8, 2, 60] starts at 8, not below train.global_batch_size=8; start lower or leave it null",
    ),
    "ramp-up, multiple": (
        dict(world=2, train__batch_ramp_up=[3, 5, 60]),
        "train.batch_ramp_up=[3, 5, 60]: the first batch size 3 is not a multiple of train.micro_batch_size=1 x "
        "data-parallel size 2 = 2; use 2 or 4",
    ),
    "ramp-up, steps": (
        dict(train__batch_ramp_up=[2, 4, 60]),
        "train.batch_ramp_up=[2, 4, 60]: steps of 4 from 2 do not reach train.global_batch_size=8; "
        "use an increment of 1, 2, 3 or 6",
    ),
    "ramp-up, samples": (
        dict(train__batch_ramp_up=[2, 1, 5]),
        "train.batch_ramp_up=[2, 1, 5]: 5 samples are too few for 6 increments; use more",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_plan_that_cannot_run_is_refused_with_the_knob_the_rule_and_what_would_work(name):
    changes, message = CASES[name]
    assert message in refusals(**changes)


def test_all_problems_are_listed_at_once():
    problems = refusals(
        world=7,
        device="cpu",
        parallel__tp=3,
        parallel__pp=2,
        zero__stage=3,
        precision__dtype="fp16",
        data__sequence_length=4096,
    )
    named = " ".join(problems)
    for part in ("attention_heads", "ffn", "7 ranks", "zero.stage=3", "fp16", "sequence_length"):
        assert part in named
    assert all("\n" not in line for line in problems)


def test_zero_2_and_3_are_allowed_with_tensor_parallelism():
    for stage in (2, 3):
        assert ParallelPlan.from_config(tiny(parallel__tp=2, zero__stage=stage), 4).zero_stage == stage


def test_fp16_is_allowed_on_a_gpu_and_bf16_on_a_cpu():
    ParallelPlan.from_config(tiny(precision__dtype="fp16"), 1, device="cuda")
    ParallelPlan.from_config(tiny(precision__dtype="bf16"), 1, device="cpu")


def test_fewer_micro_batches_than_stages_run_with_a_warning_that_states_the_bubble():
    plan = ParallelPlan.from_config(tiny(parallel__pp=4, train__global_batch_size=1), 4)
    assert "(P-1)/(M+P-1) = 75%" in plan.warnings[0]  # B6: 3 / (1 + 3)
    assert plan.bubble == 0.75
    assert not ParallelPlan.from_config(tiny(parallel__pp=4, train__global_batch_size=4), 4).warnings


def test_settings_without_effect_are_said():
    plan = ParallelPlan.from_config(tiny(parallel__sequence_parallel=True, parallel__recompute_interval=2), 1)
    assert not plan.sequence_parallel
    assert [line.split("=")[0] for line in plan.warnings] == [
        "parallel.sequence_parallel",
        "parallel.recompute_interval",
    ]
    config = tiny()
    config.parallel.stages = "profile"
    assert ParallelPlan.from_config(config, 1).warnings == ("parallel.stages=profile has no effect at parallel.pp=1",)


def test_a_warm_up_as_long_as_the_run_is_said():
    assert any("lr_warmup" in line for line in ParallelPlan.from_config(tiny(train__lr_warmup=100), 1).warnings)


def test_the_largest_plan_is_made_in_well_under_a_second():
    config = tiny(
        model__num_layers=128, model__hidden_size=25600, model__num_attention_heads=160, model__head_dim=None,
        model__num_key_value_heads=None, model__ffn_hidden_size=None, parallel__tp=8, parallel__pp=64,
        train__global_batch_size=3072,
    )  # fmt: skip
    start = time.perf_counter()
    ParallelPlan.from_config(config, 3072)
    assert time.perf_counter() - start < 0.5  # about 0.05 s of work; the rest is for a busy machine
