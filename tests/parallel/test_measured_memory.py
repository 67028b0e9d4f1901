"""Predicted bytes against memory that others measured: BLOOM's runs (nvidia-smi) and nanotron's benchmark (peak).

Each row is planned as its stack ran it: attention unfused in BLOOM's Megatron-DeepSpeed, gradients summed in fp32 with
bf16 and in fp16 with fp16, 500 M elements a bucket. Nothing is fitted: the overhead is `framework_bytes`, of two cited
numbers. Rows whose source does not state the number of layers are left out (16 of the 75 known).
"""

from __future__ import annotations

import csv

import pytest

from conf.schema import (
    Config,
    DataConfig,
    DType,
    Family,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    Recompute,
    TrainConfig,
    ZeroConfig,
)
from parallel.ledger import Ledger
from parallel.memory import predict, worst
from parallel.plan import ParallelPlan, padded_vocab_size
from parallel.published.rows import RUNS
from parallel.stages import boundaries

with RUNS.open(newline="") as _file:
    ROWS = {row["id"]: row for row in csv.DictReader(_file) if row["mem_gb"] and row["layers"]}

OUTSIDE = {  # those of nanotron are not explained: its figure does not say what it counts
    "r0135": "65 GB at micro-batch 2 where its own source has 56 GB at 4 (r0136): one of the two is a misprint",
    "r0180": "38 GB where its own source has 44 GB for the same plan (r0179)",
    "r0215": "44 GB, predicted 50: 106 layers on 12 stages, split not stated; its bf16 twins (r0217, r0218) fit",
    "r0352": "nanotron, tp 8: 63 GB, predicted 51",
    "r0353": "nanotron: 64 GB with ZeRO 1 over 4 ranks, as much as without (r0361); predicted 49",
    "r0357": "nanotron, 32 stages: 61 GB, predicted 55",
    "r0358": "nanotron: 16.3 GB, predicted 18.5, of which 2.7 are context and communicators",
    "r0364": "nanotron: 61 GB, predicted 72, of which 9 are the copy in which gradients travel",
}

NUMBERS = (
    "dp", "ffn", "gbs", "heads", "hidden", "kv_heads", "layers", "mbs", "pp", "seq", "sp", "tp", "vocab", "zero_stage",
)  # fmt: skip


def planned(row: dict[str, str]) -> tuple[Config, ParallelPlan]:
    n = {name: int(row[name] or 0) for name in NUMBERS}
    gpt, bf16 = "Llama" not in row["model"], row["precision"] == "bf16"
    dropout = 0.1 if gpt else 0.0
    config = Config(
        model=ModelConfig(
            name=row["model"], family=Family.gpt2 if gpt else Family.llama, vocab_size=n["vocab"],
            hidden_size=n["hidden"], num_layers=n["layers"], num_attention_heads=n["heads"],
            num_key_value_heads=n["kv_heads"] or None, ffn_hidden_size=n["ffn"], max_position_embeddings=n["seq"],
            tie_word_embeddings=gpt, hidden_dropout=dropout, attention_dropout=dropout,
        ),
        data=DataConfig(sequence_length=n["seq"], mask_documents=False),
        parallel=ParallelConfig(
            tp=n["tp"], pp=n["pp"], sequence_parallel=n["sp"] == 1, recompute=Recompute(row["recompute"])
        ),
        zero=ZeroConfig(stage=n["zero_stage"], bucket_size=500_000_000),
        precision=PrecisionConfig(
            dtype=DType(row["precision"]), grad_accum_dtype=DType.fp32 if bf16 else DType.fp16
        ),
        train=TrainConfig(micro_batch_size=n["mbs"], global_batch_size=n["gbs"]),
    )  # fmt: skip
    plan = ParallelPlan(
        tensor_model_parallel_size=n["tp"], pipeline_model_parallel_size=n["pp"], data_parallel_size=n["dp"],
        world_size=n["tp"] * n["pp"] * n["dp"], sequence_parallel=n["sp"] == 1 and n["tp"] > 1, schedule="1f1b",
        zero_stage=n["zero_stage"], micro_batch_size=n["mbs"], global_batch_size=n["gbs"],
        num_micro_batches=n["gbs"] // (n["mbs"] * n["dp"]), batch_ramp_up=None,
        padded_vocab_size=padded_vocab_size(n["vocab"], divisor=128, tp=n["tp"]),
        stage_layers=boundaries(blocks(n["layers"], n["pp"], with_ends="transformer|embedding" in row["note"])),
        recompute=row["recompute"], recompute_interval=1, warnings=(),
    )  # fmt: skip
    return config, plan


def blocks(layers: int, stages: int, *, with_ends: bool) -> list[int]:
    """Layers a stage; `with_ends`: embedding and head count as a layer each (BLOOM's partition of its last runs)."""
    share, left = divmod(layers + 2 * with_ends, stages)
    counts = [share + (stage < left) for stage in range(stages)]
    counts[0] -= with_ends
    counts[-1] -= with_ends
    return counts


def predicted(row: dict[str, str]) -> Ledger:
    config, plan = planned(row)
    return worst(
        predict(config, plan, device="cuda", fused_attention=not row["stack"].startswith("Megatron-DeepSpeed"))
    )


@pytest.mark.parametrize("name", [name for name in ROWS if name not in OUTSIDE])
def test_memory_is_within_ten_percent_of_what_was_measured(name):
    row = ROWS[name]
    assert predicted(row).total / 1e9 == pytest.approx(float(row["mem_gb"]), rel=0.1)


def test_the_rows_outside_are_named_and_outside():
    for name in OUTSIDE:
        measured = float(ROWS[name]["mem_gb"])
        assert abs(predicted(ROWS[name]).total / 1e9 - measured) > 0.1 * measured
    assert len(OUTSIDE) <= 0.16 * len(ROWS)


def test_blooms_plan_needs_its_59_gb_and_zero_1_halves_72():
    assert ROWS["r0233"]["mem_gb"] == "59.0" and (ROWS["r0233"]["tp"], ROWS["r0233"]["pp"]) == ("4", "12")
    assert predicted(ROWS["r0233"]).total / 1e9 == pytest.approx(59, rel=0.05)
    with_zero, without = predicted(ROWS["r0141"]), predicted(ROWS["r0142"])
    assert (with_zero.total / 1e9, without.total / 1e9) == (pytest.approx(37, rel=0.02), pytest.approx(72, rel=0.02))
