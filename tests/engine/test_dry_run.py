"""Any rank of any plan, run on the meta device: what is counted is what the ledgers say, to the byte and the call."""

from __future__ import annotations

import pytest

from conf.cli import compose_config
from engine.dry_run import dry_run
from parallel.plan import ParallelPlan
from parallel.topology import Topology

GPT3 = "model=gpt3_175b parallel=tp8_pp8 data.mask_documents=false train.global_batch_size=1536"
ONE_T = "model=megatron_1t parallel=tp8_pp64 data.mask_documents=false train.global_batch_size=3072"
LLAMA = "model=llama_70b parallel.tp=8 parallel.pp=4 train.global_batch_size=64 data.sequence_length=4096"
DROPOUT = "model.hidden_dropout=0.1 model.attention_dropout=0.1"
SP, NO_SP = "parallel.sequence_parallel=true", "parallel.sequence_parallel=false"
SELECTIVE, FULL = "parallel.recompute=selective", "parallel.recompute=full parallel.recompute_interval=3"

WIDE = "parallel.tp=4 parallel.pp=2 train.global_batch_size=64 data.sequence_length=1024 train.micro_batch_size=2"
BERT = "objective=mlm parallel.tp=4 parallel.pp=2 train.global_batch_size=64 data.sequence_length=512"
WINDOW = "model.sliding_window=512"
KINDS = ",".join(["full_attention"] * 11 + ["sliding_attention"] * 13)
SOME = f"model.sliding_window=128 model.layer_types=[{KINDS}] train.global_batch_size=8"

# overrides, ranks, (pipeline, data, tensor) of the rank that is run
CASES = {
    "gpt3-175b-rank-517-of-1024": (f"{GPT3} {SP} {SELECTIVE}", 1024, (4, 0, 5)),
    "gpt3-175b-first-stage": (f"{GPT3} {NO_SP} parallel.recompute=none {DROPOUT}", 1024, (0, 3, 7)),
    "gpt3-175b-last-stage-tied": (f"{GPT3} {SP} {FULL} {DROPOUT}", 1024, (7, 15, 0)),
    "1t-on-3072-middle": (f"{ONE_T} {SP} {SELECTIVE} {DROPOUT}", 3072, (31, 2, 3)),
    "1t-on-3072-last": (f"{ONE_T} {NO_SP} {FULL}", 3072, (63, 5, 7)),
    "llama-70b-masked-first": (f"{LLAMA} {SP} data.mask_documents=true", 64, (0, 1, 2)),
    "llama-70b-masked-last": (f"{LLAMA} {NO_SP} {SELECTIVE} data.mask_documents=true", 64, (3, 0, 0)),
    "llama-70b-middle": (f"{LLAMA} {SP} {FULL} data.mask_documents=false train.micro_batch_size=2", 64, (2, 1, 6)),
    "copied-key-value-heads": (f"{LLAMA} {SP} parallel.tp=16 data.mask_documents=false", 128, (1, 1, 11)),
    "dualpipev-first-rank": (f"{LLAMA} {SP} parallel.schedule=dualpipev data.mask_documents=true", 64, (0, 0, 1)),
    "dualpipev-turn": (f"{LLAMA} {NO_SP} parallel.schedule=dualpipev data.mask_documents=false", 64, (3, 1, 1)),
    "qwen3-head-norms": (f"model=qwen3_8b {WIDE} {SP} data.mask_documents=true", 16, (0, 1, 2)),
    "qwen3-copied-heads-selective": (f"model=qwen3_0_6b {WIDE} parallel.tp=16 {NO_SP} {SELECTIVE}", 64, (1, 1, 3)),
    "mistral-window": (f"model=mistral_7b {WIDE} {NO_SP} {WINDOW} data.mask_documents=false", 16, (1, 0, 1)),
    "mistral-window-masked": (f"model=mistral_7b {WIDE} {SP} {WINDOW}", 16, (0, 0, 1)),
    "qwen2-some-windows": (f"model=qwen2_5_0_5b parallel.pp=2 {SOME} data.mask_documents=false", 2, (1, 0, 0)),
    "pythia": (f"model=pythia_6_9b {WIDE} {SP} {DROPOUT} data.mask_documents=true", 16, (1, 1, 3)),
    "pythia-full": (f"model=pythia_1_4b {WIDE} {NO_SP} {FULL} data.mask_documents=false", 16, (0, 1, 3)),
    "bert": (f"model=bert_110m {BERT} {SP} data.mask_documents=true", 16, (0, 0, 1)),
    "bert-head": (f"model=bert_110m {BERT} {SP} {SELECTIVE} data.mask_documents=false", 16, (1, 0, 3)),
    "bert-one-device": ("model=bert_110m objective=mlm precision=fp32", 1, (0, 0, 0)),
    "megatron-bert-3.9b-first": (f"model=megatron_bert_3_9b {BERT} {NO_SP} train.micro_batch_size=8", 16, (0, 1, 2)),
    "megatron-bert-3.9b-head": (f"model=megatron_bert_3_9b {BERT} {SP} train.micro_batch_size=8", 16, (1, 1, 2)),
    "megatron-bert-1.3b-full": (f"model=megatron_bert_1_3b {BERT} {NO_SP} {FULL}", 16, (1, 0, 0)),
    "one-device": ("model=gpt2_350m data.mask_documents=false precision=fp32", 1, (0, 0, 0)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_rank_keeps_and_says_what_the_ledgers_say(case):
    overrides, world_size, coordinate = case
    config = compose_config(["precision=bf16", "zero=stage1", *overrides.split()])
    plan = ParallelPlan.from_config(config, world_size, device="cuda")
    pipe, data, tensor = coordinate
    ran = dry_run(config, plan, plan.topology.rank(pp=pipe, dp=data, tp=tensor))
    assert ran.coordinate == coordinate
    assert ran.parameter_bytes == ran.predicted_parameter_bytes
    assert ran.activations == ran.predicted_activations
    assert ran.collectives == ran.predicted_collectives
    assert ran.agrees and "counted and ledger agree" in ran.report()


def test_rank_517_of_the_issue_is_where_megatrons_order_puts_it():
    assert Topology(pp=8, dp=16, tp=8).coordinate(517) == (4, 0, 5)
