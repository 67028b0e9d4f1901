"""Adapters under every schedule and kind of recomputation draw one curve: that of plain torch on one process."""

from __future__ import annotations

from typing import Any

import pytest

from conf.schema import Family, Recompute, Schedule
from tests.engine.cases import reference_run, tiny_config
from tests.engine.finetunes import adapted_model
from tests.engine.on_ranks import train_steps
from tests.ranks import run_ranks

LORA: dict[str, Any] = {"lora__rank": 4, "train__lr": 1e-2}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "dualpipev": (2, {"parallel__pp": 2, "parallel__schedule": Schedule["dualpipev"], "zero__stage": 1}),
    "eager1f1b-full": (
        2, {"parallel__pp": 2, "parallel__schedule": Schedule["eager1f1b"], "parallel__recompute": Recompute.full},
    ),
    "tied-selective": (
        4,
        {"family": Family.gpt2, "tied": True, "parallel__pp": 2, "parallel__tp": 2, "zero__stage": 1,
         "parallel__recompute": Recompute.selective},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_adapters_draw_the_curve_of_one_process(case: str) -> None:
    ranks, changes = CASES[case]
    config = tiny_config(**LORA, **changes)
    reference = reference_run(config, steps=4, model=adapted_model(config))
    for results in run_ranks(ranks, train_steps, config, 4):
        for result, (loss, norm) in zip(results, reference, strict=True):
            assert (result.loss, result.grad_norm) == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-5))
