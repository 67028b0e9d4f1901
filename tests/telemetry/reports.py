"""A report with every field set, for tests that only need some of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from telemetry.report import StepReport

ONE = StepReport(
    step=1, train_iters=3, loss=2.0, learning_rate=1e-3, grad_norm=0.5, skipped=False, skipped_steps=0,
    loss_scale=None, samples=8, tokens=256, flops=5e8, hours=0.01, step_time_s=0.5, data_time_s=0.01,
    tokens_per_s=512.0, unmasked_tokens_per_s=500.0, tokens_per_s_per_device=256.0, model_flops_per_s_per_device=1e9,
    mfu=None, hfu=None, mfu_of_measured_rate=0.5, hfu_of_measured_rate=0.5, memory_bytes=900_000,
    peak_memory_bytes=1_000_000, checkpoint_age_steps=1, checkpoint_age_s=0.5, eta_s=1.0,
)  # fmt: skip


def report(**changes: Any) -> StepReport:
    return replace(ONE, **changes)
