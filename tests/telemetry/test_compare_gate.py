"""The gate: each class fails alone and alone is reported, in the order outcome, parity, memory, utilisation,
communication."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from telemetry.compare.divergence import tolerance_of
from telemetry.compare.gate import CLASSES, MEMORY, MEMORY_ON_CPU, Limits, Verdict, communication_seconds, judge
from telemetry.compare.runs import Run, RunError, load_run
from tests.telemetry.run_folders import loss_at, plain_config, step_row, write_run

SECONDS = "communication/tensor/all_reduce/seconds"
FAULTS = {
    "outcome": lambda step: {},  # the run breaks off: see `made`
    "parity": lambda step: {"train/loss": loss_at(step) * (1.001 if step == 7 else 1)},
    "memory": lambda step: {"memory/peak_bytes": 1_200_000_000},
    "utilisation": lambda step: {"train/model_flops_per_s_per_device": 0.75e10},
    "communication": lambda step: {SECONDS: 0.08} if step % 10 == 0 else {},
}


def made(folder: Path, *kinds: str, **changes: Any) -> Run:
    rows = [step_row(step) for step in range(1, 41)]
    for kind in kinds:
        rows = [row | FAULTS[kind](row["step"]) for row in rows]
    ending = "failed" if "outcome" in kinds else "complete"
    return load_run(write_run(folder, rows=[row | changes for row in rows], ending=ending))


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
    rows = [step_row(step) | {"tokens": 4096 * step} for step in range(1, 21)]  # fewer steps are no matter then
    [failure] = verdict(load_run(write_run(tmp_path / "run", rows=rows)), made(tmp_path / "base")).failures
    assert failure.kind == "parity" and "a step has 4,096 tokens and the baseline's 2,048" in failure.line


def test_what_the_baseline_measured_and_the_run_did_not_fails_and_the_other_way_is_said(tmp_path: Path) -> None:
    plain = [{k: v for k, v in step_row(step).items() if "communication" not in k} for step in range(1, 41)]
    run, baseline = load_run(write_run(tmp_path / "run", rows=plain)), made(tmp_path / "base")
    assert [failure.kind for failure in verdict(run, baseline).failures] == ["communication"]
    found = verdict(baseline, run)
    assert found.failures == [] and found.unjudged[0][0] == "communication"
    assert "communication: not judged: the baseline has no times" in found.text(baseline, run)


def test_a_run_that_broke_off_does_not_pass_not_even_against_itself(tmp_path: Path) -> None:
    base = made(tmp_path / "base")
    rows = [step_row(step) for step in range(1, 31)]  # more than are compared, and all the baseline's
    for ending, line in (("failed", "failed, after step 30: boom"), (None, "not ended, after step 30")):
        run = load_run(write_run(tmp_path / str(ending), rows=rows, ending=ending))
        for against in (base, run):
            [failure] = verdict(run, against).failures
            assert (failure.kind, failure.line) == ("outcome", f"the run is not complete but {line}")
    empty = load_run(write_run(tmp_path / "empty", rows=[], ending="failed"))
    assert [failure.kind for failure in verdict(empty, base).failures] == ["outcome"]


def test_a_run_that_lacks_steps_of_the_baseline_fails_and_how_many_were_compared_is_said(tmp_path: Path) -> None:
    base = made(tmp_path / "base")
    rows = [step_row(step) for step in range(1, 41) if step not in (7, 9)]
    run = load_run(write_run(tmp_path / "run", rows=rows))
    found = verdict(run, base)
    assert [failure.kind for failure in found.failures] == ["parity"]
    assert "it lacks 2 of the baseline's first 20 steps, the first is step 7" in found.failures[0].line
    assert "gate compared: 18 of 20 steps" in found.text(run, base)
    assert verdict(run, base, steps=6).failures == []
    assert "gate compared: 20 of 20 steps" in verdict(base, base).text(base, base)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_the_run_lost_fails_behind_the_compared_steps_too(value: float, tmp_path: Path) -> None:
    base = made(tmp_path / "base")
    rows = [step_row(step) | ({"train/loss": value} if step >= 39 else {}) for step in range(1, 41)]
    run = load_run(write_run(tmp_path / "run", rows=rows))
    [failure] = verdict(run, base).failures
    assert failure.kind == "parity" and failure.line.startswith(f"the loss of step 39 is {value}")
    assert "the first of 2 that are no number" in failure.line
    assert verdict(run, run).failures == []  # the baseline has none there either


def test_the_first_step_that_is_off_is_named_and_how_many_are(tmp_path: Path) -> None:
    rows = [step_row(step) | ({"train/loss": 9.0 + step} if step in (4, 11) else {}) for step in range(1, 41)]
    run = load_run(write_run(tmp_path / "run", rows=rows))
    [failure] = verdict(run, made(tmp_path / "base")).failures
    assert failure.line.startswith("the loss of step 4 is 13 and")
    assert failure.line.endswith("(the first of 2 that are off, of 20 compared)")


def test_a_run_without_gradient_norms_is_told_so(tmp_path: Path) -> None:
    rows = [{k: v for k, v in step_row(step).items() if k != "train/grad_norm"} for step in range(1, 41)]
    run, base = load_run(write_run(tmp_path / "run", rows=rows)), made(tmp_path / "base")
    [failure] = verdict(run, base).failures
    line = "the run has no gradient norm at 20 of 20 steps, the first is step 1, and the baseline has"
    assert (failure.kind, failure.line) == ("parity", line)
    assert verdict(base, run).failures == []


def test_a_baseline_without_steps_is_refused(tmp_path: Path) -> None:
    empty = load_run(write_run(tmp_path / "empty", rows=[]))
    with pytest.raises(RunError, match="recorded no step; a baseline needs the metrics of its steps"):
        verdict(made(tmp_path / "run"), empty)


def test_other_data_and_settings_are_said_in_a_line_each(tmp_path: Path) -> None:
    base = made(tmp_path / "base")
    config = plain_config(train__lr=1e-3, parallel__tp=2)
    run = load_run(write_run(tmp_path / "run", config=config, identity={"corpus_fingerprint": "other"}))
    notes = verdict(run, base).notes
    assert notes[1:] == [
        "note: data differs: corpus_fingerprint corpus-1 -> other",
        "note: config differs: train.lr 0.0003 -> 0.001",
    ]


def test_memory_of_a_cpu_is_allowed_the_noise_of_its_pages(tmp_path: Path) -> None:
    """Peaks of identical plans on a CPU differ by up to 7.6 %."""
    for device, torch, share in (("AMD EPYC", "2.13.0+cpu", MEMORY_ON_CPU), ("NVIDIA H200", "2.13.0+cu130", MEMORY)):
        who = {"device": device, "packages": {"torch": torch}}
        base = load_run(write_run(tmp_path / device / "a", identity=who))
        for off, fails in ((-0.005, False), (0.005, True)):
            rows = [step_row(step) for step in range(1, 41)]
            rows = [row | {"memory/peak_bytes": int(1.1e9 * (1 + share + off))} for row in rows]
            run = load_run(write_run(tmp_path / device / str(off), rows=rows, identity=who))
            assert bool(verdict(run, base).failures) == fails
        assert share > 0.076 or torch != "2.13.0+cpu"


def test_communication_is_summed_over_the_operations_of_an_axis(tmp_path: Path) -> None:
    run = made(tmp_path / "run", **{"communication/tensor/all_gather/seconds": 0.01})
    assert communication_seconds(run) == pytest.approx({"pipe": 0.02, "tensor": 0.06})
