"""docs/alerts.md lists the rules as they are shipped."""

from __future__ import annotations

from pathlib import Path

from telemetry.alert_text import normal_text
from tests.telemetry.alert_cases import shipped

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "alerts.md").read_text()


def test_the_table_of_shipped_rules_is_what_is_shipped():
    rows = [
        f"| {name} | `{rule.metric}` | {rule.slice.value} | {normal_text(rule)} | {rule.persistence.n} of "
        f"{rule.persistence.m} | {rule.severity.value} | {rule.owner} |"
        for name, rule in shipped().items()
    ]
    table = PAGE[PAGE.index("| rule |") : PAGE.index("All of them have")].strip().splitlines()
    assert table[2:] == rows


def test_the_rule_that_the_page_shows_is_the_shipped_one():
    shown, rule = PAGE[PAGE.index("```yaml") : PAGE.index("## What is shipped")], shipped()["mfu"]
    for part in (
        f"metric: {rule.metric}",
        f"slice: {rule.slice.value}",
        f"owner: {rule.owner}",
        "min: 0.8}",
        "{n: 8, m: 10}",
    ):
        assert part in shown
    assert rule.normal.min == 0.8 and (rule.persistence.n, rule.persistence.m) == (8, 10)
