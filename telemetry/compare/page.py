"""The report as one HTML file that opens offline: tables made here, curves and timelines drawn by assets/page.js.

It refers to nothing outside itself. Text of runs is escaped wherever it goes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from telemetry.compare.curves import AXES, CHARTS, MOST_POINTS, Chart, name_of, points, thinned
from telemetry.compare.differences import GROUPS, Difference, changes, shown, unknown_groups
from telemetry.compare.divergence import LOSS, Divergence, Tolerance, describe, event_line, events_before
from telemetry.compare.markdown import shown_text
from telemetry.compare.outcome import lines, outcome
from telemetry.compare.runs import Row, Run
from telemetry.run_folder import utc_now

ASSETS = Path(__file__).with_name("assets")
MOST_EVENTS = 400  # a run on the page; the nearest to trouble are kept
MOST_FINDINGS = 4  # open; a reader of more runs has the table first
PATCH_LINES = 200


@dataclass(frozen=True)
class Pair:
    """A run against the first, by their places among the runs."""

    first: int
    second: int
    found: Divergence


@dataclass(frozen=True)
class Report:
    """All that was found. extra: (heading, text) of what was asked for beside: gate, bisection, incident."""

    runs: Sequence[Run]
    tolerance: Tolerance
    pairs: Sequence[Pair]
    differences: Sequence[Difference]
    extra: Sequence[tuple[str, str]] = ()


def write_page(report: Report, path: Path) -> None:
    """Raises OSError where it cannot be written."""
    runs = report.runs
    title = f"{len(runs)} runs compared" if len(runs) > 1 else f"Run {runs[0].name}"
    parts = {
        "title": escape(title),
        "about": " · ".join(f"<code>{escape(str(run.folder))}</code>" for run in runs),
        "findings": _findings(report),
        "outcome": _outcome(runs),
        "differences": _differences(report),
        "timelines": _timelines(runs),
        "extra": "".join(
            f'<h2>{escape(head)}</h2><div class="card">{shown_text(text)}</div>' for head, text in report.extra
        ),
        "footer": f"made {utc_now()} by recipes/compare.py; it opens without a network",
        "css": (ASSETS / "page.css").read_text(),
        "js": "\n".join((ASSETS / name).read_text() for name in ("numbers.js", "page.js")),
        "data": _script_json(_data(report)),
    }
    pieces = (ASSETS / "page.html").read_text().split("@")
    text = "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _card(inside: str) -> str:
    return f'<div class="card">{inside}</div>'


def _script_json(value: Any) -> str:
    """As a script element may hold it: no text of a run closes the element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _findings(report: Report) -> str:
    found = [_finding(report, pair) for pair in report.pairs]
    rest = "".join(found[MOST_FINDINGS:])
    more = f"<details><summary>{len(found) - MOST_FINDINGS} more</summary>{rest}</details>" if rest else ""
    return "".join(found[:MOST_FINDINGS]) + more


def _finding(report: Report, pair: Pair) -> str:
    runs, found = report.runs, pair.found
    names = [runs[pair.first].name, runs[pair.second].name]
    kind = "apart" if found.place is not None else "agree" if found.shared else ""
    text = f"<b>{escape(' and '.join(names))}</b>: {escape(describe(found, names))}"
    before = ""
    if found.steps is not None:
        for run, step in zip((runs[pair.first], runs[pair.second]), found.steps, strict=True):
            events = "".join(f"<li><code>{escape(event_line(one))}</code></li>" for one in events_before(run, step))
            before += f"<ul><li class=soft>before it in {escape(run.name)}:</li>{events or '<li>nothing</li>'}</ul>"
        is_open = " open" if len(report.pairs) == 1 else ""
        before = f"<details{is_open}><summary>nearest events on both timelines</summary>{before}</details>"
    return f'<div class="card finding {kind}">{text}{before}</div>'


def _outcome(runs: Sequence[Run]) -> str:
    found = [outcome(run) for run in runs]
    rows = []
    for line in lines(found):
        cells = "".join(
            f'<td class="value">{_word(text) if line.label == "outcome" else _number(text)}{_ratio(ratio)}</td>'
            for text, ratio in zip(line.texts, line.ratios, strict=True)
        )
        rows.append(f"<tr><th>{escape(line.label)}</th>{cells}</tr>")
    if any(one.error for one in found):
        cells = "".join(f'<td class="value">{escape(one.error or "")}</td>' for one in found)
        rows.append(f'<tr class="bad"><th>error</th>{cells}</tr>')
    if any(run.notes for run in runs):
        cells = "".join(f'<td class="soft">{escape("; ".join(run.notes))}</td>' for run in runs)
        rows.append(f"<tr><th>notes</th>{cells}</tr>")
    return _table(["", *(run.name for run in runs)], rows, colored=True)


def _table(names: Sequence[str], rows: Sequence[str], *, colored: bool = False) -> str:
    """colored: the columns behind the first are runs."""
    heads = [
        f'<th class="run" title="{escape(name)}">{_swatch(place - 1)}{escape(name)}</th>'
        if colored and place else f"<th>{escape(name)}</th>"
        for place, name in enumerate(names)
    ]  # fmt: skip
    return f"<table><thead><tr>{''.join(heads)}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _swatch(run: int) -> str:
    """As page.js draws a run's line: eight colors, then the same dashed."""
    dashed = f" dash{run // 8 % 4}" if run >= 8 else ""
    return f'<span class="swatch{dashed}" style="color:var(--run{run % 8})"></span>'


def _number(text: str) -> str:
    """A number stays on a line with its unit."""
    return escape(text.replace(" ", "\u00a0") if text[:1].isdigit() else text)


def _word(ending: str) -> str:
    kind = ending if ending in ("complete", "failed") else "other"
    return f'<span class="word {kind}">{escape(ending)}</span>'


def _ratio(ratio: float | None) -> str:
    if ratio is None or abs(ratio - 1) < 5e-4:
        return ""
    return f'<span class="ratio">{ratio - 1:+.1%}</span>'


def _differences(report: Report) -> str:
    runs, found = report.runs, report.differences
    parts = []
    if len(runs) > 1:
        settings = [one for one in found if one.kind == "setting"]
        parts.append(_difference_table(runs, settings) if settings else '<div class="card">No setting differs.</div>')
        unknown = unknown_groups([run.last for run in runs], [run.name for run in runs])
        parts += [f'<p class="soft">{escape(line)}</p>' for line in unknown]
        for kind, head in (("derived", "what follows from them"), ("label", "only labels, paths and what is watched")):
            others = [one for one in found if one.kind == kind]
            if others:
                summary = f"<summary>{len(others)} more: {head}</summary>"
                parts.append(f"<details>{summary}{_difference_table(runs, others)}</details>")
    for run in runs:
        for start, changed in changes(run):
            head = f"{run.name}: what start {start.number} changed, from step {start.step} on"
            rows = [
                f"<tr><th>{escape(one.key)}</th>"
                + "".join(f'<td class="value mono">{_value(value)}</td>' for value in one.values)
                + "</tr>"
                for one in changed
            ]
            table = _table(["key", "before", "after"], rows)
            parts.append(f'<h3>{escape(head)}</h3><div class="card scroll">{table}</div>')
    return "".join(parts) or '<div class="card soft">One run, one start: nothing to compare.</div>'


def _difference_table(runs: Sequence[Run], found: Sequence[Difference]) -> str:
    rows = []
    for group in GROUPS:
        for place, one in enumerate([one for one in found if one.group == group]):
            cells = "".join(f'<td class="value mono">{_value(value)}</td>' for value in one.values)
            rows.append(f"<tr><th>{group if place == 0 else ''}</th><td class=mono>{escape(one.key)}</td>{cells}</tr>")
    heads = _table(["", "key", *(run.name for run in runs)], rows)
    return f'<div class="card scroll">{heads}</div>'


def _value(value: Any) -> str:
    text = escape(shown(value))
    if isinstance(value, str) and "\n" in value:
        lines = value.splitlines()
        cut = "" if len(lines) <= PATCH_LINES else f"\n... {len(lines) - PATCH_LINES} more lines"
        body = escape("\n".join(lines[:PATCH_LINES])) + cut
        return f"<details><summary>{text}</summary><pre>{body}</pre></details>"
    return text


def _timelines(runs: Sequence[Run]) -> str:
    if not any(run.events for run in runs):
        return '<div class="card soft">No run left a timeline.</div>'
    tables = []
    for run in runs:
        rows = [
            f'<tr class="{"bad" if _is_bad(event) else ""}"><td class="mono">{escape(event_line(event))}</td></tr>'
            for event in _most_telling(run.events)
        ]
        if rows:
            summary = f"<summary>{escape(run.name)}: {len(run.events)} events</summary>"
            tables.append(f'<details>{summary}<div class="card scroll">{_table(["event"], rows)}</div></details>')
    return f'<div class="card"><svg id="lanes"></svg><div id="kinds"></div></div>{"".join(tables)}'


def _is_bad(event: Row) -> bool:
    return event.get("event") in ("bad step", "rank lost", "checkpoint failed", "alert raised", "skipped step")


def _most_telling(events: Sequence[Row]) -> list[Row]:
    """All, or without the routine of a long run: its evaluations and checkpoints but the latest."""
    if len(events) <= MOST_EVENTS:
        return list(events)
    routine = [place for place, one in enumerate(events) if one.get("event") in ("evaluation", "checkpoint")]
    dropped = set(routine[: len(events) - MOST_EVENTS])
    return [one for place, one in enumerate(events) if place not in dropped]


def _data(report: Report) -> dict[str, Any]:
    runs = report.runs
    charts = [found for chart in CHARTS if (found := _chart(chart, runs)) is not None]
    apart = [pair for pair in report.pairs if pair.found.axis == "step" and pair.found.shared]
    if apart:
        charts.insert(1, _apart(report, apart))
    events = [[_event(run, event) for event in _most_telling(run.events)] for run in runs]
    return {"runs": [run.name for run in runs], "axes": AXES, "charts": charts, "events": events,
            "marks": [_mark(report, pair) for pair in report.pairs if pair.found.steps is not None]}  # fmt: skip


def _chart(chart: Chart, runs: Sequence[Run]) -> dict[str, Any] | None:
    name = name_of(chart, runs)
    if name is None:
        return None
    series = [_series(place, points(run, chart, name)) for place, run in enumerate(runs)]
    unit = f"{chart.unit} of the measured matrix rate" if name.endswith("of_measured_rate") else chart.unit
    return {
        "key": chart.key, "title": chart.title, "unit": unit, "logarithmic": chart.logarithmic,
        "wide": chart.key == "loss", "marked": chart.key in ("loss", "norm"), "smooth": chart.key != "rate",
        "series": [one for one in series if one["y"]],
    }  # fmt: skip


def _series(run: int, found: Sequence[dict[str, float | None]]) -> dict[str, Any]:
    x = {axis: [_rounded(one[axis]) for one in found] for axis in AXES}
    return {"run": run, "x": x, "y": [_rounded(one["y"]) for one in found]}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.7g}") if value % 1 else value


def _apart(report: Report, pairs: Sequence[Pair]) -> dict[str, Any]:
    """How far each run's losses are from the first's, step by step, with what is allowed."""
    first, series = report.runs[0], []
    losses = [row[LOSS] for row in first.steps.values()]
    for pair in pairs:
        second = report.runs[pair.second]
        found: list[dict[str, float | None]] = []
        for step in pair.found.shared:
            apart = abs(second.steps[step][LOSS] - first.steps[step][LOSS])
            at = {axis: second.steps[step].get(axis) for axis in AXES}
            found.append(at | {"y": apart if math.isfinite(apart) else None})
        series.append(_series(pair.second, thinned(found, most=MOST_POINTS)))
    return {
        "key": "apart", "title": "Distance of losses", "unit": f"|loss - loss of {first.name}|",
        "logarithmic": any(y for one in series for y in one["y"]), "wide": False, "marked": True, "smooth": False,
        "limit": report.tolerance.allowed(LOSS, next(filter(math.isfinite, losses), 0.0)), "series": series,
    }  # fmt: skip


def _mark(report: Report, pair: Pair) -> dict[str, Any]:
    found = pair.found
    assert found.steps is not None
    row = report.runs[pair.second].steps[found.steps[1]]
    label = "parts" if len(report.runs) == 2 else f"{report.runs[pair.second].name} parts"
    return {"run": pair.second, "x": {axis: row.get(axis) for axis in AXES}, "label": label}


def _event(run: Run, event: Row) -> dict[str, Any]:
    step = event.get("step", 0)
    row = run.steps.get(step, {"step": step})
    x = {axis: row.get(axis, 0 if step == 0 else None) for axis in AXES}
    return {"event": str(event.get("event")), "line": event_line(event), "x": x}
