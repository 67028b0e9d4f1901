"""recipes/benchmark.py: its arithmetic, what it writes, and that the peers train the same model as ours."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conf.schema import Config, DataConfig, ModelConfig
from engine.comparison import rates, rates_table, ratios, record
from engine.contenders import comparisons
from engine.measure import Measurement, compare
from parallel.plan_name import plan_config

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
TINY = ModelConfig(
    name="tiny", vocab_size=256, hidden_size=64, num_layers=4, num_attention_heads=4, ffn_hidden_size=128,
    max_position_embeddings=32, make_vocab_size_divisible_by=8,
)  # fmt: skip


def tiny(*plans: str) -> Config:
    config = Config(model=TINY, data=DataConfig(sequence_length=32, mask_documents=False), seed=3)
    config.train.micro_batch_size, config.train.global_batch_size, config.train.lr = 2, 8, 3e-3
    config.benchmark.plans = list(plans)
    return config


def test_rates_are_tokens_over_the_median_step_and_over_all_cpu_time() -> None:
    measurement = Measurement(step_times_s=[2.0, 9.0, 4.0], cpu_s=30.0, losses=[], peak_bytes=[5, 7])
    row = rates("a", measurement, ranks=2, tokens_per_step=400, flops_per_token=10, matmul_rate=2000.0)
    assert (row.step_time_s, row.tokens_per_s, row.tokens_per_cpu_s) == (4.0, 100.0, 40.0)
    assert (row.model_flops_per_s, row.of_matmul_rate, row.peak_memory_bytes) == (1000.0, 0.5, 7)


def test_ratio_is_ours_over_the_peer() -> None:
    def row(name: str, step_s: float, cpu_s: float):
        measurement = Measurement(step_times_s=[step_s], cpu_s=cpu_s)
        return rates(name, measurement, ranks=1, tokens_per_step=100, flops_per_token=1, matmul_rate=1.0)

    (ratio,) = ratios([row("ours", 2.0, 3.0)], [row("peer", 3.0, 6.0)])
    assert (ratio.ours, ratio.peer) == ("ours", "peer")
    assert ratio.tokens_per_s == pytest.approx(1.5) and ratio.tokens_per_cpu_s == pytest.approx(2.0)
    assert record([([row("ours", 2.0, 3.0)], [row("peer", 3.0, 6.0)])], {})["ratios"][0]["peer"] == "peer"
    assert "ours" in rates_table([row("ours", 2.0, 3.0)])


@pytest.mark.parametrize(
    ("name", "mesh", "zero", "sequence_parallel"),
    [("tp1", (1, 1, 1), 0, False), ("dp2_zero1", (1, 1, 2), 1, False), ("tp2_pp4_sp", (2, 4, 1), 0, True)],
)
def test_plan_is_read_from_its_name(name: str, mesh: tuple[int, int, int], zero: int, sequence_parallel: bool) -> None:
    config, read = plan_config(name, tiny())
    assert (read, config.zero.stage, config.parallel.sequence_parallel) == (mesh, zero, sequence_parallel)


def test_unknown_part_of_a_plan_name_is_refused_with_what_is_known() -> None:
    with pytest.raises(ValueError, match=r"'ep2' of 'tp2_ep2' is not known; join tpN"):
        plan_config("tp2_ep2", tiny())


@pytest.mark.slow
def test_benchmark_of_two_contenders_writes_table_and_json(tmp_path: Path) -> None:
    sizes = ["vocab_size=64", "hidden_size=32", "num_layers=2", "num_attention_heads=2", "ffn_hidden_size=64"]
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "recipes/benchmark.py"), "benchmark.plans=[tp1,pp2]", "benchmark.peers=false",
            "benchmark.steps=1", "benchmark.rounds=2", "benchmark.warmup_steps=1", "benchmark.cores=1",
            "data.sequence_length=16", *(f"model.{size}" for size in sizes), "run.id=here",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "runs/benchmark/here.json").read_text())
    assert [row["name"] for row in written["contenders"]] == ["ours tp1", "ours pp2"]
    for row in written["contenders"]:
        assert row["name"] in done.stdout
        steps = written["steps"][row["name"]]
        assert len(steps["step_times_s"]) == 2 and len(steps["losses"]) == 3
        assert row["tokens_per_s"] == pytest.approx(8 * 16 / row["step_time_s"])
        assert row["peak_memory_bytes"] > 0 and row["tokens_per_cpu_s"] > 0
    one, two = (written["steps"][row["name"]]["losses"] for row in written["contenders"])
    assert one == pytest.approx(two, rel=1e-5)


# The same start, tokens and rule of update: only the order of sums differs, 1e-6 in the first steps. A peer that did
# not clip, or saw other tokens, would be off by more than 1e-3 within these four steps.
SAME = 1e-3


# Each contender's processes take seconds to start, so `make test` keeps one whose peer splits the model.
@pytest.mark.parametrize(
    "plan",
    ["pp2", *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("tp1", "dp2", "tp2"))],
)
def test_first_losses_of_every_peer_are_ours(plan: str) -> None:
    config = tiny(plan)
    if plan == "pp2":
        # DeepSpeed clips fp32 without ZeRO by the first stage's norm alone; without clipping it is the same program.
        config.optimizer.clip_grad = 0.0
    ((ours, peers),) = comparisons(config)
    assert len(ours) == 1 and peers
    results = compare([*ours, *peers], cores=1, warmup_steps=3, steps=1, rounds=1)
    expected = results[ours[0].name].losses
    assert len(expected) == 4 and expected[-1] < expected[0] - 0.1 and not any(map(math.isnan, expected))
    for peer in peers:
        assert results[peer.name].losses == pytest.approx(expected, rel=SAME), peer.name
