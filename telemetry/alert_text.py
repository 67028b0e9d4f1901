"""What an alert says to a reader at 3 a.m.: the value, the normal range and where it comes from, who, what to try."""

from __future__ import annotations

from conf.schema import AlertCompared, AlertReference, AlertRule
from telemetry.alert_values import Value

OF = {
    AlertReference.prediction: "the prediction",
    AlertReference.observation: "the promoted observation",
    AlertReference.recent: "the recent median",
    AlertReference.peers: "its stage's other ranks",
}


def raised_text(
    name: str,
    rule: AlertRule,
    value: Value,
    bounds: tuple[float | None, float | None],
    reference: float | None,
    *,
    outside: int,
    of: int,
) -> str:
    normal = range_text(bounds) + _reference_text(rule, reference)
    return (
        f"ALERT {name} ({value.where or value.slice}): {rule.metric} is {number(value.value)}, normal is {normal}; "
        f"outside in {outside} of {of}; {rule.severity.value}, for {rule.owner}; try: {rule.mitigation}"
    )


def cleared_text(name: str, rule: AlertRule, value: Value, bounds: tuple[float | None, float | None]) -> str:
    place = value.where or value.slice
    return f"cleared {name} ({place}): {rule.metric} is {number(value.value)}, normal is {range_text(bounds)}"


def gone_text(name: str, place: str) -> str:
    return f"cleared {name} ({place}): another plan runs from here on"


def range_text(bounds: tuple[float | None, float | None]) -> str:
    low, high = bounds
    if low is None and high is None:
        return "any finite number"
    if high is None:
        return f"{number(low)} or more"
    if low is None:
        return f"{number(high)} or less"
    return f"{number(low)} to {number(high)}"


def normal_text(rule: AlertRule) -> str:
    """The range as the rule has it: "0.8 or more x the prediction"."""
    normal = rule.normal
    if normal.relative_to is AlertReference.absolute:
        return range_text((normal.min, normal.max))
    of = OF[normal.relative_to]
    if normal.compared_as is AlertCompared.difference:
        return f"{range_text((normal.min, normal.max))} above {of}"
    return f"{range_text((normal.min, normal.max))} x {of}"


def _reference_text(rule: AlertRule, reference: float | None) -> str:
    if reference is None:
        return ""
    return f" ({normal_text(rule)} of {number(reference)})"


def number(value: float | None) -> str:
    """1234567 -> 1,234,567; 0.123456 -> 0.1235."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
