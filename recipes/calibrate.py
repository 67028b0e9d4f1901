"""Judge the planner by published training runs: one calibration a GPU generation and software stack.

python recipes/calibrate.py                     the shipped calibrations on the rows their fits never saw
python recipes/calibrate.py --runs MORE.csv     on other rows with the same columns
python recipes/calibrate.py --with NAME         what one stack's calibration says of the other stacks' rows
python recipes/calibrate.py --fit               fit again, on every other row of each stack; writes calibrations.json

Errors are of TFLOP/s per GPU: |predicted / reported - 1|. The fit starts from data sheets and may leave them only as
far as rows ask for it (a Gaussian prior on each number's logarithm); a row far off counts less (a pseudo-Huber loss).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from conf import interrupts

    interrupts.while_imports_run()

import numpy
from scipy.optimize import least_squares

from parallel.published.calibration import (
    CALIBRATIONS,
    Calibration,
    data_sheet,
    limits,
    predicted_step_s,
    read_calibrations,
)
from parallel.published.rows import RUNS, PublishedRun, by_stack, read_runs
from telemetry.tables import table

# Prior width of each number's logarithm: how far from the data sheet it may be.
WIDTHS = {
    "matrix_flops": 0.25, "operand_bandwidth": 0.7, "attention_flops": 0.5, "memory_bandwidth": 0.3, "kernel_s": 0.7,
    "micro_batch_s": 1.0, "step_s": 1.0, "intra_bandwidth": 0.8, "intra_latency_s": 0.5, "inter_bandwidth": 1.2,
    "inter_latency_s": 0.5, "unaligned_slowdown": 1.0, "overlap": 1.0,
}  # fmt: skip
NOISE = 0.02  # of a reported time


def fit(runs: Sequence[PublishedRun], start: Calibration, limits: dict[str, float]) -> Calibration:
    """The calibration that explains `runs` best without leaving the data sheet for nothing, within `limits`.

    Communication that hides wholly says nothing of its link, so that slower links are starts of their own.
    """

    def at(x: Sequence[float]) -> Calibration:
        moved = {name: getattr(start, name) * math.exp(z * w) for (name, w), z in zip(WIDTHS.items(), x, strict=True)}
        return replace(start, **moved)

    def residuals(x: Sequence[float]) -> numpy.ndarray:
        calibration = at(x)
        errors = [math.log(predicted_step_s(run, calibration) / run.step_s) / NOISE for run in runs]
        huber = [math.copysign(math.sqrt(2 * (math.sqrt(1 + e * e) - 1)), e) for e in errors]
        return numpy.array([*huber, *x])

    most = [math.log(limits[n] / getattr(start, n)) / w if n in limits else math.inf for n, w in WIDTHS.items()]
    slower = [-1.0 if name == "inter_bandwidth" else 0.0 for name in WIDTHS]
    found = [
        least_squares(residuals, numpy.multiply(slower, times), bounds=(-math.inf, most)) for times in (0.0, 1.0, 2.0)
    ]
    return at(min(found, key=lambda result: result.cost).x)


def errors(runs: Sequence[PublishedRun], calibration: Calibration) -> list[float]:
    return [abs(run.step_s / predicted_step_s(run, calibration) - 1) for run in runs]


def summary(found: Sequence[float]) -> tuple[str, ...]:
    """rows, mean, median, 90th percentile, largest."""
    if not found:
        return ("0", "", "", "", "")
    tenth = quantiles(found, n=10, method="inclusive")[-1] if len(found) > 1 else found[0]
    return (str(len(found)), *(f"{100 * x:.1f} %" for x in (mean(found), median(found), tenth, max(found))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=RUNS, help="a table of runs (default: the published ones)")
    parser.add_argument("--fit", action="store_true", help="fit again and write the calibrations")
    parser.add_argument("--with", dest="one", metavar="NAME", help="judge every row by this calibration")
    parser.add_argument("--rows", action="store_true", help="print every row, predicted beside reported")
    options = parser.parse_args()
    try:
        runs, unusable = read_runs(options.runs)
        if options.fit:
            write({stack.name: fit(of[::2], data_sheet(stack), limits(stack)) for stack, of in by_stack(runs)}, runs)
        calibrations = read_calibrations()
        if options.one is not None:
            if options.one not in calibrations:
                raise ValueError(f"--with {options.one} is no calibration; use one of {', '.join(calibrations)}")
            calibrations = dict.fromkeys(calibrations, calibrations[options.one])
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report(runs, calibrations, every_row=options.rows)
    for row in unusable:
        print(f"not used: {row.id} ({row.source}): {row.reason}")
    return 0


def write(calibrations: dict[str, Calibration], runs: Sequence[PublishedRun]) -> None:
    """calibrations.json: numbers to four digits, and the rows that each fit saw."""
    seen = {stack.name: [run.id for run in of[::2]] for stack, of in by_stack(list(runs))}
    plain = {name: calibration.to_plain() | {"fitted_on": seen[name]} for name, calibration in calibrations.items()}
    CALIBRATIONS.write_text(json.dumps(plain, indent=1) + "\n")


def report(runs: Sequence[PublishedRun], calibrations: dict[str, Calibration], *, every_row: bool) -> None:
    fitted = {row for calibration in calibrations.values() for row in calibration.fitted_on}
    known = [(run.config, run.plan, run.step_s) for run in runs if run.id in fitted]  # some are printed in two tables
    fitted |= {run.id for run in runs if (run.config, run.plan, run.step_s) in known}
    lines, unseen = [], []
    for stack, of_stack in by_stack(list(runs)):
        calibration = calibrations[stack.name]
        seen = [run for run in of_stack if run.id in fitted]
        new = [run for run in of_stack if run.id not in fitted]
        found = errors(new, calibration)
        unseen += list(zip(new, found, strict=True))
        lines.append((stack.name, *summary(errors(seen, calibration))[:3], *summary(found)))
        if every_row:
            print_rows(of_stack, calibration, fitted)
    lines.append(("all", "", "", "", *summary([error for _, error in unseen])))
    several = [error for run, error in unseen if run.nodes > 1]
    lines.append(("all on several nodes", "", "", "", *summary(several)))
    header = ("stack", "fitted rows", "mean", "median", "unseen rows", "mean", "median", "90th percentile", "largest")
    print(table(header, lines) + "\n")
    sources = dict.fromkeys(run.source for run, _ in unseen)
    by_source = [(name, *summary([error for run, error in unseen if run.source == name])) for name in sources]
    print(table(("source", *header[4:]), by_source) + "\n")


def print_rows(runs: Sequence[PublishedRun], calibration: Calibration, fitted: set[str]) -> None:
    rows = []
    for run in runs:
        predicted, plan = predicted_step_s(run, calibration), run.plan
        degrees = f"tp{plan.tensor_model_parallel_size} pp{plan.pipeline_model_parallel_size} "
        degrees += f"dp{plan.data_parallel_size} x {plan.micro_batch_size} zero{plan.zero_stage} {plan.recompute}"
        rates = run.tflops(run.step_s), run.tflops(predicted)
        rows.append(
            (run.id, run.config.model.name, degrees, f"{rates[0]:.1f}", f"{rates[1]:.1f}",
             f"{100 * (rates[1] / rates[0] - 1):+.1f} %", "fitted" if run.id in fitted else "")
        )  # fmt: skip
    print(table(("row", "model", "plan", "reported TFLOP/s", "predicted", "error", ""), rows) + "\n")


if __name__ == "__main__":
    sys.exit(main())
