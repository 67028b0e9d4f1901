"""The gate: each class fails alone and alone is reported, in the order parity, memory, utilisation, communication."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from telemetry.compare.divergence import tolerance_of
from telemetry.compare.gate import CLASSES, Limits, Verdict, communication_seconds, judge
from telemetry.compare.runs import Run, load_run
from tests.telemetry.run_folders import loss_at, step_row, write_run

SECONDS = "communication/tensor/all_reduce/seconds"
FAULTS = {
    "parity": lambda step: {"train/loss": loss_at(step) * (1.001 if step == 7 else 1)},
    "memory": lambda step: {"memory/peak_bytes": 1_200_000_000},
    "utilisation": lambda step: {"train/model_flops_per_s_per_device": 0.75e10},
    "communication": lambda step: {SECONDS: 0.08} if step % 10 == 0 else {},
}


def made(folder: Path, *kinds: str, **changes: Any) -> Run:
    rows = [step_row(step) for step in range(1, 41)]
    for kind in kinds:
        rows = [row | FAULTS[kind](row["step"]) for row in rows]
    return load_run(write_run(folder, rows=[row | changes for row in rows]))


def verdict(run: Run, baseline: Run, **limits: Any) -> Verdict:
    return judge(run, baseline, Limits(tolerance_of([run, baseline]), **limits))


@pytest.mark.parametrize("kind", CLASSES)
def test_each_class_fails_alone(kind: str, tmp_path: Path) -> None:
    found = verdict(made(tmp_path / "run", kind), made(tmp_path / "base"))
    assert [failure.kind for failure in found.failures] == [kind]
    assert found.passed == list(CLASSES[: CLASSES.index(kind)])


@pytest.mark.parametrize("first", range(len(CLASSES)))
def test_of_several_classes_only_the_first_is_reported(first: int, tmp_path: Path) -> None:
    run, baseline = made(tmp_path / "run", *CLASSES[first:]), made(tmp_path / "base")
    found = verdict(run, baseline)
    assert {failure.kind for failure in found.failures} == {CLASSES[first]}
    later = ", ".join(CLASSES[first + 1 :])
    assert (f"not judged until that is mended: {later}" in found.text(run, baseline)) == bool(later)


@pytest.mark.parametrize(
    ("kind", "limits"),
    [("memory", {"memory": 0.1}), ("utilisation", {"utilisation": 0.26}), ("communication", {"communication": 0.43})],
)
def test_a_stated_tolerance_is_what_counts(kind: str, limits: dict, tmp_path: Path) -> None:
    """1.2 GB for 1.1 is 1.091 x, 7.5 of 10 GFLOP/s is 0.75 x, 0.02 + 0.08 s for 0.02 + 0.05 s is 1.429 x."""
    run, baseline = made(tmp_path / "run", kind), made(tmp_path / "base")
    assert verdict(run, baseline).failures and not verdict(run, baseline, **limits).failures


def test_less_memory_faster_steps_and_less_communication_pass(tmp_path: Path) -> None:
    run, baseline = made(tmp_path / "run"), made(tmp_path / "base", "memory", "communication")
    assert verdict(run, baseline).failures == []


def test_parity_is_of_the_first_steps_and_of_the_gradient_norm_too(tmp_path: Path) -> None:
    rows = [step_row(step) | ({"train/grad_norm": 5.0} if step == 30 else {}) for step in range(1, 41)]
    run, baseline = load_run(write_run(tmp_path / "run", rows=rows)), made(tmp_path / "base")
    assert verdict(run, baseline).failures == []  # rounding alone may have grown by then
    [failure] = verdict(run, baseline, steps=40).failures
    assert failure.kind == "parity" and failure.line.startswith("the gradient norm of step 30 is 5")


def test_a_loss_that_is_not_a_number_fails_parity(tmp_path: Path) -> None:
    rows = [step_row(step) | ({"train/loss": math.nan} if step == 3 else {}) for step in range(1, 41)]
    run = load_run(write_run(tmp_path / "run", rows=rows))
    assert "step 3 is nan" in verdict(run, made(tmp_path / "base")).failures[0].line
    assert verdict(run, run).failures == []
    none = made(tmp_path / "none", **{"train/loss": math.nan})
    assert "no loss of the 20 steps compared is a number" in verdict(none, none).failures[0].line


def test_other_batches_have_no_parity(tmp_path: Path) -> None:
    rows = [step_row(step) | {"tokens": 4096 * step} for step in range(1, 41)]
    [failure] = verdict(load_run(write_run(tmp_path / "run", rows=rows)), made(tmp_path / "base")).failures
    assert failure.kind == "parity" and "a step has 4,096 tokens and the baseline's 2,048" in failure.line


def test_what_the_baseline_measured_and_the_run_did_not_fails_and_the_other_way_is_said(tmp_path: Path) -> None:
    plain = [{k: v for k, v in step_row(step).items() if "communication" not in k} for step in range(1, 41)]
    run, baseline = load_run(write_run(tmp_path / "run", rows=plain)), made(tmp_path / "base")
    assert [failure.kind for failure in verdict(run, baseline).failures] == ["communication"]
    found = verdict(baseline, run)
    assert found.failures == [] and found.unjudged[0][0] == "communication"
    assert "communication: not judged: the baseline has no times" in found.text(baseline, run)


def test_an_empty_run_does_not_pass(tmp_path: Path) -> None:
    empty = load_run(write_run(tmp_path / "run", rows=[], ending="failed"))
    assert [failure.kind for failure in verdict(empty, made(tmp_path / "base")).failures] == ["parity"]
    assert verdict(made(tmp_path / "base2"), empty).failures


def test_communication_is_summed_over_the_operations_of_an_axis(tmp_path: Path) -> None:
    run = made(tmp_path / "run", **{"communication/tensor/all_gather/seconds": 0.01})
    assert communication_seconds(run) == pytest.approx({"pipe": 0.02, "tensor": 0.06})
