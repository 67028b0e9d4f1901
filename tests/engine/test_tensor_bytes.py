"""The memory ledger is what ranks really hold: states and saved activations, byte for byte, over the families.

Measured with tensors alone (`engine.tensor_bytes`), through the real engines on gloo ranks. The tolerance is none: the
ledger counts each tensor that autograd keeps, and DeepSpeed's padding.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch.distributed as dist

from conf.schema import Config, DType, Family, Recompute, Schedule
from engine.tensor_bytes import MeasuredStep
from parallel.activations import MicroBatch, micro_batch
from parallel.architecture import positions_travel
from parallel.ledger import Ledger
from parallel.memory import predict
from parallel.plan import ParallelPlan
from tests.engine.cases import tiny_config
from tests.engine.on_ranks import one_step, open_trainer
from tests.ranks import run_ranks

BF16 = dict(precision__dtype=DType.bf16, zero__stage=1)
GPT2, LLAMA, QWEN3, NEOX = Family.gpt2, Family.llama, Family.qwen3, Family.gpt_neox
BERT, MEGATRON_BERT = Family.bert, Family.megatron_bert
DUAL, EAGER = Schedule["dualpipev"], Schedule["eager1f1b"]
SELECTIVE, FULL = Recompute.selective, Recompute.full

CASES: list[tuple[int, dict[str, Any]]] = [
    (2, dict(family=LLAMA, parallel__pp=2, parallel__recompute=FULL, parallel__recompute_interval=2, **BF16)),
    (4, dict(family=GPT2, tied=True, dropout=0.1, parallel__tp=2, parallel__pp=2, parallel__sequence_parallel=True)),
    (2, dict(family=LLAMA, zero__stage=2, train__micro_batch_size=2, data__mask_documents=True)),
    (2, dict(family=GPT2, parallel__recompute=SELECTIVE, **{**BF16, "zero__stage": 3})),
    (2, dict(family=LLAMA, parallel__pp=2, parallel__schedule=DUAL, zero__stage=1)),
    (4, dict(family=QWEN3, parallel__tp=2, parallel__pp=2, data__mask_documents=True, model__sliding_window=5)),
    (4, dict(family=BERT, dropout=0.1, parallel__tp=2, parallel__pp=2, parallel__sequence_parallel=True)),
    # the slow ones from here on
    (2, dict(family=MEGATRON_BERT, parallel__tp=2, **BF16)),
    (2, dict(family=MEGATRON_BERT, zero__stage=2, data__mask_documents=True)),
    (2, dict(family=BERT, zero__stage=1, parallel__recompute=SELECTIVE)),
    (2, dict(family=BERT, zero__stage=3)),
    (2, dict(family=MEGATRON_BERT, parallel__pp=2, parallel__recompute=FULL, data__mask_documents=True, **BF16)),
    (2, dict(family=BERT, parallel__pp=2, parallel__schedule=DUAL, dropout=0.1, **BF16)),
    (4, dict(family=QWEN3, parallel__tp=4, parallel__sequence_parallel=True, **BF16)),
    (4, dict(family=NEOX, tied=True, dropout=0.1, parallel__tp=2, parallel__pp=2, parallel__sequence_parallel=True)),
    (2, dict(family=NEOX, parallel__tp=2, data__mask_documents=True, **BF16)),
    (2, dict(family=Family.qwen2, parallel__tp=2, model__sliding_window=9, train__micro_batch_size=2, **BF16)),
    (2, dict(family=Family.mistral, parallel__recompute=SELECTIVE, model__sliding_window=9, **BF16)),
    (4, dict(family=LLAMA, parallel__tp=4, train__micro_batch_size=2)),  # two key-value heads on four ranks
    (2, dict(family=GPT2, tied=True, data__mask_documents=True, dropout=0.1, **BF16)),
    (1, dict(family=GPT2, dropout=0.1)),
    (2, dict(family=LLAMA, precision__grad_accum_dtype=DType.bf16, precision__dtype=DType.bf16)),
    (2, dict(family=LLAMA, parallel__pp=2, parallel__schedule=EAGER, data__mask_documents=True)),
    (4, dict(family=LLAMA, parallel__tp=2, parallel__sequence_parallel=True, parallel__recompute=FULL, **BF16)),
    (4, dict(family=GPT2, parallel__tp=2, **{**BF16, "zero__stage": 2})),
    (4, dict(family=LLAMA, parallel__tp=2, zero__stage=3, data__mask_documents=True, parallel__recompute=SELECTIVE)),
    (4, dict(family=GPT2, parallel__pp=4, tied=True, parallel__recompute=SELECTIVE, dropout=0.1, **BF16)),
    (3, dict(family=GPT2, train__global_batch_size=12, zero__stage=1, optimizer__decay_norms_and_biases=True)),
    (3, dict(family=LLAMA, train__global_batch_size=12, zero__stage=3)),
    (8, dict(family=LLAMA, parallel__tp=2, parallel__pp=2, parallel__sequence_parallel=True, **BF16)),
    (4, dict(family=GPT2, parallel__tp=2, parallel__pp=2, parallel__schedule=DUAL, data__mask_documents=True, **BF16)),
]
FAST = 7


def name(case: tuple[int, dict[str, Any]]) -> str:
    ranks, changes = case
    parts = (f"{key.rpartition('__')[2]}={getattr(value, 'value', value)}" for key, value in changes.items())
    return "-".join([f"{ranks}ranks", *parts])


def config_of(*, dropout: float = 0.0, **changes: Any) -> Config:
    config = tiny_config(**{"train__global_batch_size": 16, "data__mask_documents": False, **changes})
    config.model.hidden_dropout = config.model.attention_dropout = dropout
    return config


def measured(config: Config) -> tuple[dict[str, int], int]:
    """(states, most bytes saved for backward) of this rank in a step."""
    trainer, plan, groups, streams = open_trainer(config)
    with MeasuredStep(trainer) as step:
        one_step(trainer, plan, groups, streams, config, 1)
    if dist.is_initialized():
        dist.barrier()
    return asdict(step.states), step.activations


def not_seen(config: Config, kept: MicroBatch, ledger: Ledger) -> float:
    """Of the ledger's activations: what tensors hold without autograd having saved them.

    A checkpoint's closure holds the mask and the rotary values; so do the CPU's own attention the mask, and the rank
    the whole rotary tables where each micro-batch has values of its own.
    """
    recomputes = config.parallel.recompute is not Recompute.none
    own_attention = config.precision.dtype is DType.fp32 and not config.model.attention_dropout
    masks = kept.mask if recomputes or own_attention else 0
    tables = kept.tables if recomputes or positions_travel(config) else 0
    return tables + ledger.in_flight * (masks + (kept.rotary if recomputes else 0))


def check(ranks: int, changes: dict[str, Any]) -> None:
    config = config_of(**changes)
    plan = ParallelPlan.from_config(config, ranks)
    kept = micro_batch(config, padded_vocab_size=plan.padded_vocab_size, device="cpu")
    ledgers = predict(config, plan, device="cpu")
    results = run_ranks(ranks, measured, config)
    most = max(states["gradients"] for states, _ in results)
    for rank, (states, activations) in enumerate(results):
        ledger = ledgers[plan.coordinate(rank)[0]]
        if plan.zero_stage == 2:  # whole parameters across a border of partitions: the ledger is of the rank with most
            states = states | {"gradients": most}
        assert states == {field: getattr(ledger, field) for field in states}
        assert activations == ledger.activations - not_seen(config, kept, ledger)


@pytest.mark.parametrize("case", CASES[:FAST], ids=name)
def test_ranks_hold_the_bytes_of_the_ledger(case) -> None:
    check(*case)


LORA = dict(lora__rank=4)
ADAPTED: list[tuple[int, dict[str, Any]]] = [
    (2, dict(family=LLAMA, parallel__pp=2, zero__stage=1, **LORA)),
    (2, dict(family=LLAMA, zero__stage=0, lora__target_modules=["q_proj", "down_proj"], **LORA)),
    (2, dict(family=GPT2, tied=True, zero__stage=2, **LORA)),
    (4, dict(family=NEOX, parallel__tp=2, parallel__sequence_parallel=True, **LORA, **BF16)),
]


@pytest.mark.parametrize("case", ADAPTED, ids=name)
def test_ranks_that_train_adapters_hold_the_states_of_the_ledger(case) -> None:
    """Whole weights; gradients, masters and moments of the adapters alone. Activations are the ledger's estimate."""
    ranks, changes = case
    config = config_of(**changes)
    plan = ParallelPlan.from_config(config, ranks)
    ledgers = predict(config, plan, device="cpu")
    for rank, (states, _) in enumerate(run_ranks(ranks, measured, config)):
        ledger = ledgers[plan.coordinate(rank)[0]]
        assert states == {field: getattr(ledger, field) for field in states}
        assert ledger.optimizer_moments < ledger.weights


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[FAST:], ids=name)
def test_ranks_of_the_whole_list_hold_the_bytes_of_the_ledger(case) -> None:
    check(*case)
