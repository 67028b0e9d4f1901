"""Alert rules as YAML and the command line give them -> `AlertRule`, and every reason to refuse one, a line each.

Not here: what a rule is (`conf.alert_schema`), and evaluating it (`telemetry.alerts`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.knobs import did_you_mean
from conf.schema import AlertReference, AlertRule, AlertSlice
from parallel.expectation import AXIS, counterparts

# Keys of metrics.jsonl (a test holds them to what sinks write); of each stage without its number.
METRICS = (
    *(f"train/{name}" for name in (
        "loss", "learning_rate", "grad_norm", "skipped", "skipped_steps", "loss_scale", "samples", "step_time_s",
        "data_time_s", "data_share", "tokens_per_s", "unmasked_tokens_per_s", "tokens_per_s_per_device",
        "model_flops_per_s_per_device", "mfu", "hfu", "mfu_of_measured_rate", "hfu_of_measured_rate", "memory_bytes",
        "peak_memory_bytes", "checkpoint_age_steps", "checkpoint_age_s", "eta_s", "telemetry_time_s",
    )),
    "validation/loss", "pipeline/bubble", "pipeline/imbalance", "pipeline/recompute_share", "pipeline/compute_s",
    "memory/bytes", "memory/peak_bytes", "memory/growth_bytes", "memory/of_ledger", "communication/exposed_share",
    "communication/overlap_share", "ranks/slowdown", "ranks/slowest",
)  # fmt: skip
OPEN = ("instruction/", "communication/")  # an instruction's name, or AXIS/OPERATION/calls, follows
OF_RANKS = (
    "step_s", "compute_s", "recompute_s", "waiting_s", "communication_s", "alone_s", "memory_bytes", "peak_bytes",
    "growth_bytes",
)  # fmt: skip


def typed(given: Mapping[str, Any]) -> tuple[dict[str, AlertRule], list[str]]:
    """(rules by name, problems: unknown fields, values of another kind, fields without a value)."""
    rules: dict[str, AlertRule] = {}
    problems: list[str] = []
    for name, values in given.items():
        key = f"alerts.{name}"
        if values is None:  # switched off, as a YAML file can say it
            continue
        if isinstance(values, AlertRule):  # built in Python
            rules[name] = values
            continue
        if not isinstance(values, dict):
            problems.append(f"{key}={values} is not a rule; write {key}.FIELD=..., or ~{key} to switch it off")
            continue
        found = [*_unknown(AlertRule, values, key)] or [*_missing(values, key, [one for one in given if one != name])]
        if not found:
            try:
                rules[name] = OmegaConf.to_object(OmegaConf.merge(_schema(), values))  # type: ignore[assignment]
            except OmegaConfBaseException as error:
                line = str(error).splitlines()[0]
                found = [f"{key}.{error.full_key}: {line}" if error.full_key else f"{key}: {line}"]
        problems += found
    return rules, problems


@cache
def _schema() -> Any:
    return OmegaConf.structured(AlertRule)


def _unknown(kind: type, values: Mapping[str, Any], key: str) -> Iterator[str]:
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    for name, value in values.items():
        if name not in names:
            yield f"{key}.{name} is no field of an alert rule{did_you_mean(str(name), names)}; {', '.join(names)}"
        elif is_dataclass(hints[name]) and isinstance(value, dict):
            yield from _unknown(hints[name], value, f"{key}.{name}")  # type: ignore[arg-type]


def _missing(values: Mapping[str, Any], key: str, others: list[str]) -> Iterator[str]:
    missing = [name for name in ("metric", "owner", "mitigation") if not values.get(name)]
    if len(missing) == 3:
        meant = did_you_mean(key, [f"alerts.{other}" for other in others])
        yield f"{key} is not a rule{meant}{'' if meant else ';'} a new one needs metric, owner and mitigation"
    elif missing:
        yield f"{key} has no {' and no '.join(missing)}; set {', '.join(f'{key}.{name}=...' for name in missing)}"


def problems(rules: Mapping[str, AlertRule]) -> list[str]:
    """Every reason to refuse the rules, whatever runs."""
    return [line for name, rule in rules.items() for line in _problems(f"alerts.{name}", rule)]


def _problems(key: str, rule: AlertRule) -> Iterator[str]:
    normal, (n, m) = rule.normal, (rule.persistence.n, rule.persistence.m)
    if not 1 <= n <= m:
        yield f"{key}.persistence: n={n} of m={m} observations cannot be; n must be from 1 to m"
    if normal.min is not None and normal.max is not None and normal.min > normal.max:
        yield f"{key}.normal: min={normal.min:g} is above max={normal.max:g}"
    if normal.min is None and normal.max is None and normal.relative_to is not AlertReference.absolute:
        yield f"{key}.normal is relative to {normal.relative_to.value} but has no bound; set {key}.normal.min or .max"
    if normal.window < 2:
        yield f"{key}.normal.window={normal.window} is too short for a median; use 2 or more"
    yield from _metric_problems(key, rule)


def _metric_problems(key: str, rule: AlertRule) -> Iterator[str]:
    where, metric, reference = rule.slice, rule.metric, rule.normal.relative_to
    if where is AlertSlice.rank and metric not in OF_RANKS:
        yield f"{key}.metric={metric} is not kept of each rank; {', '.join(OF_RANKS)} are"
    elif where is AlertSlice.axis and metric not in AXIS:
        yield f"{key}.metric={metric} is not kept of each axis; {', '.join(AXIS)} are"
    elif where not in (AlertSlice.rank, AlertSlice.axis) and not _is_metric(metric):
        meant = did_you_mean(metric, METRICS) or "; docs/logging.md lists them"
        yield f"{key}.metric={metric} is no key of metrics.jsonl{meant}"
    elif reference is AlertReference.peers and where is not AlertSlice.rank:
        yield f"{key}.normal.relative_to=peers compares ranks; it needs {key}.slice=rank"
    elif reference in (AlertReference.prediction, AlertReference.observation):
        known = counterparts(reference, where)
        if metric not in known:
            have = f"of a {where.value} only {', '.join(known)} have" if known else f"nothing of a {where.value} has"
            yield f"{key}.metric={metric} has no {reference.value} to be relative to; {have} one"


def _is_metric(name: str) -> bool:
    if name in METRICS or re.sub(r"/stage\d+$", "", name) in METRICS:
        return True
    return name.startswith(OPEN[0]) or (name.startswith(OPEN[1]) and name.count("/") == 3)
