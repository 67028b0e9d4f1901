"""Published runs: the shipped calibrations belong to them, and the planner keeps its aims on rows no fit saw."""

from __future__ import annotations

import csv
import re
from statistics import mean, median

import pytest

from conf.cli import compose_config
from conf.knobs import CONF, options
from parallel.published.calibration import limits, predicted_step_s, read_calibrations
from parallel.published.rows import RUNS, by_stack, read_runs
from recipes.calibrate import errors, summary

RUNS_READ, UNUSABLE = read_runs()
STACKS = {stack.name: (stack, runs) for stack, runs in by_stack(RUNS_READ)}
CALIBRATIONS = read_calibrations()
UNSEEN = [
    (run, CALIBRATIONS[name])
    for name, (_, runs) in STACKS.items()
    for run in runs
    if run.id not in CALIBRATIONS[name].fitted_on
]


def test_every_row_is_a_run_or_says_why_it_is_none():
    with open(RUNS, newline="") as file:
        ids = [row["id"] for row in csv.DictReader(file)]
    assert sorted(ids) == sorted([run.id for run in RUNS_READ] + [row.id for row in UNUSABLE])
    assert all(row.reason for row in UNUSABLE) and len(RUNS_READ) > 340


def test_every_stack_has_a_calibration_fitted_on_every_second_of_its_rows():
    assert STACKS.keys() == CALIBRATIONS.keys()
    for name, (_, runs) in STACKS.items():
        ids = sorted(run.id for run in runs)
        assert CALIBRATIONS[name].fitted_on == tuple(id for number, id in enumerate(ids) if number % 2 == 0), name


def test_no_calibration_exceeds_what_its_gpu_can_do():
    for name, (stack, _) in STACKS.items():
        for field, most in limits(stack).items():
            assert 0 < getattr(CALIBRATIONS[name], field) <= most * 1.001, (name, field)  # four digits are kept


@pytest.mark.parametrize("several", [False, True], ids=["all", "on several nodes"])
def test_tflops_of_rows_that_no_fit_saw_are_within_5_percent_at_the_median_and_8_in_the_mean(several):
    found = [
        abs(run.tflops(predicted_step_s(run, calibration)) / run.tflops(run.step_s) - 1)
        for run, calibration in UNSEEN
        if run.nodes > 1 or not several
    ]
    assert len(found) > 120 and median(found) <= 0.05 and mean(found) <= 0.08


def test_the_recipe_reports_the_same_errors():
    run, calibration = UNSEEN[0]
    ratio = run.tflops(predicted_step_s(run, calibration)) / run.tflops(run.step_s)
    assert errors([run], calibration) == [pytest.approx(abs(ratio - 1))]
    assert summary([0.01, 0.02, 0.09]) == ("3", "4.0 %", "2.0 %", "7.6 %", "9.0 %")
    assert summary([]) == ("0", "", "", "", "") and summary([0.5])[3] == "50.0 %"


def written(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def some_row(**changes):
    with open(RUNS, newline="") as file:
        return next(row for row in csv.DictReader(file) if row["id"] == UNSEEN[0][0].id) | changes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(gpus=""), "gpus is not stated"),
        (dict(gpus="many"), "gpus=many is not a number"),
        (dict(hidden=""), "hidden is not stated"),
        (dict(tp="3", pp="5", dp="7"), "GPUs are not tp 3 x pp 5 x dp 7"),
        (dict(gpu="TPU v4"), "no calibration for"),
        (dict(iter_time_s="", tokens_per_s_per_gpu="", tflops_per_gpu="", mfu_pct="", scaling_eff_pct=""), "neither"),
        (dict(iter_time_s="soon"), "iter_time_s=soon is not a number"),
        (dict(iter_time_s="0"), "iter_time_s=0 is not positive"),
        (dict(recompute="some"), "recompute=some"),
        (dict(peak_tflops=""), "peak_tflops is not stated"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_row_that_cannot_be_used_says_why(tmp_path, changes, reason):
    runs, unusable = read_runs(written(tmp_path / "runs.csv", [some_row(**changes)]))
    assert runs == [] and reason in unusable[0].reason


def test_a_table_with_other_columns_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"no column id, source, stack, .*; the columns are those of runs\.csv"):
        read_runs(written(tmp_path / "other.csv", [{"model": "x", "gpu": "y", "hidden": "1"}]))
    row = some_row()
    del row["precision"], row["seq"]
    with pytest.raises(ValueError, match="no column seq, precision; "):
        read_runs(written(tmp_path / "fewer.csv", [row]))
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(ValueError, match="no column"):
        read_runs(tmp_path / "empty.csv")


def test_a_row_shorter_than_the_head_says_what_it_lacks(tmp_path):
    lines = RUNS.read_text().splitlines()
    (tmp_path / "short.csv").write_text(f"{lines[0]}\n{','.join(lines[1].split(',')[:12])}\n")
    runs, unusable = read_runs(tmp_path / "short.csv")
    assert runs == [] and len(unusable) == 1


@pytest.mark.parametrize("name", options()["cluster"])
def test_a_clusters_rates_are_those_of_the_calibration_that_it_names(name):
    rates = compose_config([f"cluster={name}"]).cluster.rates
    assert (rates.source is None) == (rates.matrix_flops is None), "rates say where they come from"
    if rates.source is None or "calibrations.json" not in rates.source:
        return
    if "probe" in rates.source:  # measured, not fitted
        return
    calibration = CALIBRATIONS[rates.source.split()[0]]
    for field in (
        "matrix_flops", "operand_bandwidth", "attention_flops", "memory_bandwidth", "kernel_s", "micro_batch_s",
        "step_s",
    ):  # fmt: skip
        assert getattr(rates, field) == getattr(calibration, field), field
    written = (CONF / "cluster" / f"{name}.yaml").read_text()
    of_another = re.search(r"overlap: \S+ +# of (\w+)", written)
    assert rates.overlap == (CALIBRATIONS[of_another.group(1)] if of_another else calibration).overlap
