"""arXiv:2205.05198's formulas give the numbers that are published of them, to the last digit printed."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from parallel.activation_formulas import block_bytes, first_stage_bytes, first_stage_ends_bytes, state_bytes
from parallel.activations import block_bytes as our_block_bytes
from parallel.activations import micro_batch
from tests.parallel.configs import gpt

GIB = 2**30
ROWS = list(csv.DictReader((Path(__file__).parent / "data/activation_memory.csv").open()))
STATES = [row for row in ROWS if row["what"].startswith("parameters")]
ACTIVATIONS = [row for row in ROWS if row["what"].startswith("activations")]


def numbers(row: dict[str, str]) -> dict[str, int]:
    names = ("layers", "hidden", "heads", "seq", "vocab", "mbs", "tp", "pp", "vpp")
    return {name: int(row[name]) for name in names}


def last_digit(printed: str) -> float:
    """Half a unit of the last digit, and the float error of the sum."""
    return 0.5 * 10 ** -len(printed.partition(".")[2]) + 1e-9


def first_stage_gib(row: dict[str, str]) -> float:
    n = numbers(row)
    block = block_bytes(
        sequence=n["seq"], micro_batch=n["mbs"], hidden=n["hidden"], heads=n["heads"], tp=n["tp"],
        sequence_parallel=row["sp"] == "1", recompute=row["recompute"],
    )  # fmt: skip
    return first_stage_bytes(block, layers=n["layers"], pp=n["pp"], chunks=n["vpp"]) / GIB


def test_every_published_row_is_tried():
    assert len(STATES) + len(ACTIVATIONS) == len(ROWS) and (len(STATES), len(ACTIVATIONS)) == (3, 19)


@pytest.mark.parametrize("row", STATES, ids=lambda row: row["model"])
def test_parameters_and_optimizer_states_are_the_papers_bars(row):
    n = numbers(row)
    ours = state_bytes(layers=n["layers"], hidden=n["hidden"], tp=n["tp"], pp=n["pp"]) / GIB
    assert ours == float(row["gib_paper_or_formula"])


@pytest.mark.parametrize("row", ACTIVATIONS, ids=lambda row: f"{row['model']}-sp{row['sp']}-{row['recompute']}")
def test_activations_of_the_first_stage_are_the_published_ones(row):
    printed = row["gib_paper_or_formula"]
    assert first_stage_gib(row) == pytest.approx(float(printed), abs=last_digit(printed))


def test_percentages_of_the_baseline_are_the_formulas_ones():
    for row in (row for row in ACTIVATIONS if row["note"].startswith("formula percent")):
        baseline = first_stage_gib(row | {"sp": "0", "recompute": "none"})
        printed = row["note"].split()[-1]
        assert 100 * first_stage_gib(row) / baseline == pytest.approx(float(printed), abs=last_digit(printed))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_our_blocks_without_a_fused_kernel_are_the_papers_and_the_norms_statistics(recompute, sequence_parallel):
    config = gpt(
        layers=48, hidden=6144, heads=64, train__micro_batch_size=4, parallel__tp=8, parallel__recompute=recompute,
        parallel__sequence_parallel=sequence_parallel,
    )  # fmt: skip
    kept = micro_batch(config, padded_vocab_size=51200, device="cuda", fused_attention=False).stage(1, False, False)
    paper = block_bytes(
        sequence=2048, micro_batch=4, hidden=6144, heads=64, tp=8, sequence_parallel=sequence_parallel,
        recompute=recompute,
    )  # fmt: skip
    shards = 8 if sequence_parallel else 1
    if recompute == "full":  # the paper keeps a block's input whole, we keep the shard that arrives
        assert sum(kept) == paper / shards
    else:
        assert sum(kept) == pytest.approx(paper + 2 * 2 * 4 * 4 * 2048 / shards, rel=1e-12)


def test_our_ends_are_the_papers_and_a_few_numbers_a_token():
    config = gpt(layers=48, hidden=6144, heads=64, parallel__tp=8, parallel__sequence_parallel=True)
    ours = micro_batch(config, padded_vocab_size=51200, device="cuda")
    shape = dict(sequence=2048, micro_batch=1, hidden=6144, tp=8, vocabulary=51200)
    masks = first_stage_ends_bytes(**shape, pp=4)
    ids_and_flags, positions = 2048 * (8 + 1), 2048 * 8
    assert 4 * (ours.embedding - ids_and_flags - positions) == masks
    head = first_stage_ends_bytes(**shape, pp=1) - first_stage_ends_bytes(**shape, pp=2) / 2
    statistics, losses = 2 * 4 * 2048 / 8, 2048 * (4 + 4 + 8 + 1 + 1)
    assert ours.final_norm + ours.head + ours.loss == head + statistics + losses


def test_the_fused_kernel_saves_the_scores_and_keeps_a_number_a_head_and_token():
    config = gpt(layers=48, hidden=6144, heads=64, train__micro_batch_size=4, parallel__tp=8)
    unfused = sum(micro_batch(config, padded_vocab_size=0, device="cuda", fused_attention=False).block)
    saved = 5 * 64 * 2048**2 * 4 / 8 - 4 * 64 * 2048 * 4 / 8
    assert unfused - our_block_bytes(config, device="cuda") == saved
