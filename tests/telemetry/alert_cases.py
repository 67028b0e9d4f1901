"""Rows that drive each shipped alert rule, with its boundary worked by hand from the numbers in EXPECTED."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conf.cli import compose_config
from conf.schema import AlertRule
from parallel.expectation import Expectation
from telemetry.alerts import Alerts, Event

NAN, INF = float("nan"), float("inf")
PREDICTED = {
    "device": "cuda",
    "mfu": 0.5,
    "step_s": 1.0,
    "bubble": [0.125, 0.25],
    "imbalance": 2.0,
    "seconds": {
        "compute": 0.5, "recomputation": 0.0, "tensor": 0.125, "pipe": 0.0, "data": 0.125, "optimizer": 0.0,
        "fixed": 0.0, "bubble": 0.25,
    },
    "memory": [{"total": 1000}, {"total": 2000}],
    "communication": [
        {"tensor": {"calls": 4, "bytes": 100, "seconds": 0.25}, "data": {"calls": 1, "bytes": 10, "seconds": 0.375}},
        {"tensor": {"calls": 2, "bytes": 50, "seconds": 0.125}, "data": {"calls": 1, "bytes": 10, "seconds": 0.25}},
    ],
}  # fmt: skip
EXPECTED = Expectation("tp2_pp2", "a", PREDICTED, None, checkpoint_interval=100)


@dataclass(frozen=True)
class Case:
    """row(value) -> (row of metrics.jsonl, ranks); bound: the last normal value; inside, outside: on its two sides.

    before: this many rows of `inside` make the reference of a rule that is relative to the recent past.
    """

    slice: str
    row: Callable[[Any], tuple[dict[str, Any], list[dict[str, Any]] | None]]
    inside: Any
    bound: Any
    outside: Any
    before: int = 0


def key(name: str) -> Callable[[Any], tuple[dict[str, Any], None]]:
    return lambda value: ({name: value}, None)


def of_tensor_axis(value: float) -> tuple[dict[str, Any], None]:
    """In two operations; the data axis is as predicted."""
    seconds = "communication/{}/{}/seconds".format
    row = {seconds("tensor", "all_reduce"): value - 0.25, seconds("tensor", "all_gather"): 0.25}
    return row | {seconds("data", "reduce_scatter"): 0.25, "communication/tensor/all_reduce/calls": 900}, None


def ranks(*compute_s: float | None) -> list[dict[str, Any]]:
    """Two stages of half the ranks each."""
    half = len(compute_s) // 2
    return [
        {"rank": rank, "host": f"host{rank}", "pp": rank // half, "compute_s": seconds}
        for rank, seconds in enumerate(compute_s)
    ]


def third_rank(value: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Rank 2 of stage 0's four, whose median is 1; stage 1 is three times as slow in all its ranks."""
    return {}, ranks(1.0, 1.0, value, 1.0, 3.0, 3.0, 3.0, 3.0)


CASES = {
    "mfu": Case("plan tp2_pp2", key("train/mfu"), 0.5, 0.4, 0.399),  # 0.8 x 0.5
    "throughput_drop": Case("plan tp2_pp2", key("train/tokens_per_s"), 1000.0, 700.0, 699.0, before=50),
    # predicted: (0.125 + 0.125) s exposed of (0.625 + 0.375) / 2 s: half is hidden
    "communication_overlap": Case("run", key("communication/overlap_share"), 0.5, 0.3, 0.29),
    "communication_exposed": Case("run", key("communication/exposed_share"), 0.25, 0.4, 0.41),  # 0.25 s of 1 s
    "communication_time": Case("axis tensor", of_tensor_axis, 0.5, 0.75, 0.76),  # 3 x 0.25, the stage with most
    "pipeline_bubble": Case("stage 1", key("pipeline/bubble/stage1"), 0.25, 0.35, 0.36),
    "stage_imbalance": Case("run", key("pipeline/imbalance"), 2.0, 2.3, 2.31),  # 1.15 x 2
    "memory_over_ledger": Case("stage 1", key("memory/growth_bytes/stage1"), 2000, 2200, 2201),
    "loss_spike": Case("run", key("train/loss"), 2.0, 3.0, 3.01, before=50),
    "gradient_norm": Case("run", key("train/grad_norm"), 1.0, 10.0, 10.01, before=50),
    "non_finite": Case("run", key("train/loss"), 2.0, 1e300, NAN),
    "skipped_steps": Case("run", key("train/skipped"), False, False, True),
    "data_starvation": Case("run", key("train/data_share"), 0.01, 0.1, 0.11),
    "straggler": Case("rank 2", third_rank, 1.0, 1.25, 1.26),
    "checkpoint_age": Case("run", key("train/checkpoint_age_steps"), 100, 150, 151),  # 1.5 x checkpoint.interval
}


@functools.cache
def shipped() -> dict[str, AlertRule]:
    return compose_config([]).alerts


class Driven:
    """One rule of the shipped ones, fed value after value."""

    def __init__(self, name: str) -> None:
        self.case, self.rule = CASES[name], shipped()[name]
        self.alerts = Alerts({name: self.rule})
        self.alerts.begin(EXPECTED)
        self.step = 0
        assert self.feed(*[self.case.inside] * self.case.before) == []

    def feed(self, *values: Any) -> list[Event]:
        events = []
        for value in values:
            self.step += 1
            row, gathered = self.case.row(value)
            events += self.alerts.observe({"step": self.step, **row}, gathered, self.step)
        return events
