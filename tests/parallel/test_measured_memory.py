"""Predicted bytes against memory that others measured: BLOOM's runs (nvidia-smi) and nanotron's benchmark (reserved).

Each row is planned as its stack ran it: attention unfused in BLOOM's Megatron-DeepSpeed, gradients summed in fp32 with
bf16 and in fp16 with fp16, 500 M elements a bucket; nanotron's as its code has it (`parallel.published.nanotron`).
Nothing is fitted: BLOOM's overhead is `framework_bytes`, of two cited numbers. Rows whose source does not state the
number of layers are left out (16 of the 75 known).
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
from parallel.published.nanotron import GIB, TIED_BELOW, allocated_in_step, blocks_per_stage, reserved_bytes
from parallel.published.rows import RUNS
from parallel.stage_values import stage_parameters
from parallel.stages import boundaries

with RUNS.open(newline="") as _file:
    ROWS = {row["id"]: row for row in csv.DictReader(_file) if row["mem_gb"] and row["layers"]}

OUTSIDE = {  # nanotron's figure is what the allocator reserved; its tensors in the step are as predicted, see STEP
    "r0135": "65 GB at micro-batch 2 where its own source has 56 GB at 4 (r0136): one of the two is a misprint",
    "r0180": "38 GB where its own source has 44 GB for the same plan (r0179)",
    "r0352": "nanotron, tp 8, micro-batch 8: 63 GiB reserved for 51 of tensors; what lies between is not known",
    "r0357": "nanotron, 32 micro-batches in flight: 61 GiB reserved for 53 of tensors; what lies between is not known",
}

# nanotron's rank 0 in its third step: millions of parameters, and max_memory_allocated in GiB after the last backward.
# Columns "Local Params" and "Mem Alloc (GB)" of the benchmark's own table, of which there is a copy in GitHub's
# eyao600/Rapid-LLM, validation_scripts/huggingface_data/bench_final2_mod_add.csv; its "Mem Res (GB)" is the figure of
# our rows. The run of r0361 is not here: by that table it had 8 key-value heads, by our row 64.
STEP = {
    "r0348": (2210, 41.48), "r0350": (336, 6.45), "r0352": (1110, 21.23), "r0353": (1730, 21.92), "r0354": (671, 12.7),
    "r0357": (998, 16.93), "r0358": (940, 9.2), "r0359": (2210, 21.61), "r0363": (2210, 22.51), "r0364": (4920, 49.87),
    "r0366": (940, 10.35), "r0368": (2210, 28.19), "r0369": (940, 11.88),
}  # fmt: skip

NUMBERS = (
    "dp", "ffn", "gbs", "heads", "hidden", "kv_heads", "layers", "mbs", "pp", "seq", "sp", "tp", "vocab", "zero_stage",
)  # fmt: skip


def planned(row: dict[str, str]) -> tuple[Config, ParallelPlan]:
    n = {name: int(row[name] or 0) for name in NUMBERS}
    gpt, bf16 = "Llama" not in row["model"], row["precision"] == "bf16"
    nanotron = row["stack"].startswith("nanotron")
    dropout = 0.1 if gpt else 0.0
    config = Config(
        model=ModelConfig(
            name=row["model"], family=Family.gpt2 if gpt else Family.llama, vocab_size=n["vocab"],
            hidden_size=n["hidden"], num_layers=n["layers"], num_attention_heads=n["heads"],
            num_key_value_heads=n["kv_heads"] or None, ffn_hidden_size=n["ffn"], max_position_embeddings=n["seq"],
            tie_word_embeddings=gpt or (nanotron and n["ffn"] < TIED_BELOW),
            hidden_dropout=dropout, attention_dropout=dropout,
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
    if nanotron:
        held = blocks_per_stage(config.model, stages=n["pp"])
    else:
        held = blocks(n["layers"], n["pp"], with_ends="transformer|embed" in row["note"])
    plan = ParallelPlan(
        tensor_model_parallel_size=n["tp"], pipeline_model_parallel_size=n["pp"], data_parallel_size=n["dp"],
        world_size=n["tp"] * n["pp"] * n["dp"], sequence_parallel=n["sp"] == 1 and n["tp"] > 1, schedule="1f1b",
        zero_stage=n["zero_stage"], micro_batch_size=n["mbs"], global_batch_size=n["gbs"],
        num_micro_batches=n["gbs"] // (n["mbs"] * n["dp"]), batch_ramp_up=None,
        padded_vocab_size=padded_vocab_size(n["vocab"], divisor=128, tp=n["tp"]),
        stage_layers=boundaries(held),
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
    """Of BLOOM's stack, whose figures are of the rank that holds most."""
    return worst(predict(*planned(row), device="cuda", fused_attention=False))


def predicted_figure(row: dict[str, str]) -> float:
    """In the row's unit, of the rank it is of."""
    if row["stack"].startswith("nanotron"):
        return reserved_bytes(*planned(row), device_bytes=float(row["gpu_mem_gb"]) * GIB) / GIB
    return predicted(row).total / 1e9


@pytest.mark.parametrize("name", [name for name in ROWS if name not in OUTSIDE])
def test_memory_is_within_ten_percent_of_what_was_measured(name):
    assert predicted_figure(ROWS[name]) == pytest.approx(float(ROWS[name]["mem_gb"]), rel=0.1)


@pytest.mark.parametrize("name", STEP)
def test_nanotrons_stages_and_its_tensors_in_the_step_are_as_measured(name):
    """Parameters to the three digits printed. Bytes to 0.12 GiB below: workspaces of libraries are not counted."""
    millions, allocated = STEP[name]
    config, plan = planned(ROWS[name])
    assert stage_parameters(config, plan, 0) / 1e6 == pytest.approx(millions, rel=0.004)
    assert 0 < allocated - allocated_in_step(config, plan) / GIB < 0.12


def test_the_rows_outside_are_named_and_outside():
    for name in OUTSIDE:
        measured = float(ROWS[name]["mem_gb"])
        assert abs(predicted_figure(ROWS[name]) - measured) > 0.1 * measured
    assert len(OUTSIDE) <= 0.07 * len(ROWS)


def test_blooms_plan_needs_its_59_gb_and_zero_1_halves_72():
    assert ROWS["r0233"]["mem_gb"] == "59.0" and (ROWS["r0233"]["tp"], ROWS["r0233"]["pp"]) == ("4", "12")
    assert predicted(ROWS["r0233"]).total / 1e9 == pytest.approx(59, rel=0.05)
    with_zero, without = predicted(ROWS["r0141"]), predicted(ROWS["r0142"])
    assert (with_zero.total / 1e9, without.total / 1e9) == (pytest.approx(37, rel=0.02), pytest.approx(72, rel=0.02))
