"""The outcome is of the whole run, whatever start ends it; names that alerts know are those that sinks write."""

from __future__ import annotations

import re

from conf.alert_rules import METRICS
from telemetry.report import EvaluationReport, as_metrics
from telemetry.summary import Outcome
from tests.telemetry.reports import report
from tests.telemetry.test_ranks import four


def test_a_resumed_run_keeps_its_first_loss_its_best_and_what_was_skipped() -> None:
    rows = [
        as_metrics(EvaluationReport(step=0, tokens=0, flops=0.0, hours=0.0, loss=6.0)),
        as_metrics(report(step=1, loss=5.5)),
        as_metrics(report(step=2, loss=5.0, skipped=True, skipped_steps=1)),
        as_metrics(EvaluationReport(step=2, tokens=512, flops=1e9, hours=0.1, loss=3.0)),
        as_metrics(report(step=3, loss=9.0)),  # trained again by the start that goes on
        as_metrics(EvaluationReport(step=3, tokens=768, flops=1e9, hours=0.1, loss=1.0)),
    ]
    outcome = Outcome()
    outcome.go_on(rows, step=3)
    outcome.add(report(step=3, loss=4.5, skipped_steps=1))
    outcome.add(EvaluationReport(step=3, tokens=768, flops=1e9, hours=0.1, loss=4.0))
    assert (outcome.first_loss, outcome.last_loss) == (5.5, 4.5)
    assert [one.loss for one in outcome.validation] == [6.0, 3.0, 4.0]
    found = outcome.as_summary()
    assert (found["best/validation_loss"], found["final/validation_loss"], found["skipped_steps"]) == (3.0, 4.0, 1)


def test_alert_rules_know_every_name_that_sinks_write_and_no_other() -> None:
    full = report(mfu=0.5, hfu=0.5, loss_scale=2.0, ranks=four(in_flight_s=1.0))
    rows = [as_metrics(full), as_metrics(EvaluationReport(step=1, tokens=1, flops=1.0, hours=0.1, loss=2.0))]
    written = {re.sub(r"/stage\d+$", "", name) for row in rows for name in row if "/" in name}
    assert written - set(METRICS) == {name for name in written if name.startswith("instruction/")}
    assert set(METRICS) <= written


def test_what_thousands_of_ranks_told_is_not_kept_to_the_end_of_a_run() -> None:
    outcome = Outcome()
    for step in (1, 2):
        outcome.add(report(step=step, ranks=four(), instructions={"ForwardPass": 1.0}))
    assert all(step.ranks is None and not step.instructions for step in outcome.steps)
    assert outcome.as_summary()["median/ranks/slowdown"] == four().slowest.slowdown
    assert outcome.slowest is not None and outcome.slowest.rank == 3
