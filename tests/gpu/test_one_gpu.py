"""What needs a CUDA device: `make test-gpu`. One device, one rank, each test in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conf.schema import DType, Recompute
from tests.engine.cases import reference_run, tiny_config
from tests.gpu.steps import NAMES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
ROOT = Path(__file__).resolve().parents[2]


def on_gpu(name: str) -> list[dict]:
    """The steps of tests/gpu/steps.py's case `name`."""
    assert name in NAMES
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.steps", name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["fp32", "fp32-zero1", "fp32-zero2", "fp32-zero3"])
def test_fp32_on_the_device_draws_the_reference_curve(name: str) -> None:
    """TF32 is off by default in torch, so fp32 is fp32: the tolerance of the CPU parity tests."""
    for got, (loss, norm) in zip(on_gpu(name), reference_run(tiny_config(), steps=5), strict=True):
        assert (got["loss"], got["grad_norm"]) == pytest.approx((loss, norm), rel=1e-5)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_16_bit_on_the_device_stays_within_rounding(name: str) -> None:
    """The bound of tests/engine/test_parity.py for bf16; fp16 has three bits more."""
    for got, (loss, _) in zip(on_gpu(name), reference_run(tiny_config(), steps=5), strict=True):
        assert got["loss"] == pytest.approx(loss, abs=0.035) and not got["skipped"]


def test_fp16_skips_an_overflow_and_halves_its_scale() -> None:
    """Case C2: the first scale, 2^30, overflows; steps are skipped until it fits, and the losses stay finite."""
    steps = on_gpu("fp16-overflow")
    assert steps[0]["skipped"] and not steps[-1]["skipped"]
    assert steps[-1]["loss_scale"] < 2**30


def test_selective_and_full_recomputation_need_less_memory() -> None:
    peak = {mode.value: on_gpu(f"memory-{mode.value}")[-1]["peak_bytes"] for mode in Recompute}
    assert peak["full"] < peak["none"] and peak["selective"] <= peak["none"]


def test_every_dtype_is_offered() -> None:
    assert {dtype.value for dtype in DType} <= {name.partition("-")[0] for name in NAMES}
