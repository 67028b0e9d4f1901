"""What would bring a plan under a limit: each suggestion is a knob that, set, gives the bytes it promised."""

from __future__ import annotations

import re

import pytest

from conf.schema import Config
from parallel.memory_advice import advice, worst_stage
from parallel.rules import problems
from tests.parallel.configs import changed, gpt, tiny

GB = 1e9
WORLD = 16
LIMIT = 15 * 10**9


def big() -> Config:
    return gpt(
        layers=16, hidden=4096, heads=32, parallel__tp=2, parallel__pp=2, train__micro_batch_size=4,
        train__global_batch_size=64, zero__stage=0, precision__grad_accum_dtype="bf16",
    )  # fmt: skip


def set_as_typed(config: Config, knob: str, value: str) -> Config:
    number = {"true": True, "false": False}.get(value, int(value) if value.isdigit() else value)
    return changed(config, **{knob.replace(".", "__"): number})


def test_a_plan_that_fits_needs_no_advice():
    assert advice(big(), WORLD, 10**15, device="cuda") == []


def test_every_suggestion_gives_the_bytes_it_promises_and_the_best_comes_first():
    before = worst_stage(big(), WORLD, device="cuda").total
    first, *suggestions = advice(big(), WORLD, LIMIT, device="cuda")
    assert first.startswith(f"stage 0 needs {before / GB:.1f} GB") and "limit of 15.0 GB" in first
    promised = []
    for line in suggestions:
        knob, value, was, promise, verdict = re.fullmatch(
            r"([a-z_.]+)=(\S+): ([\d.]+) -> ([\d.]+) GB, (fits|not enough by itself)", line
        ).groups()
        config = set_as_typed(big(), knob, value)
        assert problems(config, world_size=WORLD, device="cuda") == []
        after = worst_stage(config, WORLD, device="cuda").total
        assert (was, promise) == (f"{before / GB:.1f}", f"{after / GB:.1f}")
        assert (verdict == "fits") == (after <= LIMIT)
        promised.append(after)
    assert promised == sorted(promised) and max(promised) < before
    knobs = {line.partition("=")[0] for line in suggestions}
    assert knobs >= {
        "parallel.recompute", "parallel.sequence_parallel", "parallel.tp", "parallel.pp", "train.micro_batch_size",
    }  # fmt: skip


def test_what_the_rules_refuse_is_not_suggested():
    """ZeRO 2 and 3 do not go with a pipeline; neither does ZeRO 0 with offloaded states."""
    lines = advice(big(), WORLD, 10**9, device="cuda")
    assert not [line for line in lines if line.startswith(("zero.stage=2", "zero.stage=3", "zero.offload"))]


@pytest.mark.parametrize("dp", [1, 2])
def test_zero_is_suggested_where_the_data_axis_has_ranks_to_spread_over(dp):
    lines = advice(changed(big(), parallel__pp=1), 2 * dp, 10**9, device="cuda")
    assert any(line.startswith("zero.stage=3") for line in lines) == (dp > 1)


def test_nothing_left_to_change_is_said():
    lines = advice(tiny(parallel__recompute="full", zero__stage=0), 1, 1000, device="cpu")
    assert lines[1:] == ["no single change of plan lowers it; use more ranks, or a smaller model or sequence"]
