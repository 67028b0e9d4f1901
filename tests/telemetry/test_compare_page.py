"""The report: one HTML file that opens offline, pictures, the incident's record, and the recipe around them."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from recipes.compare import main
from telemetry.compare.curves import CHARTS, points, thinned
from telemetry.compare.divergence import divergence, tolerance_of
from telemetry.compare.incident import incident
from telemetry.compare.runs import load_run
from tests.telemetry.run_folders import event, loss_at, plain_config, step_row, write_lines, write_run

EVIL = "</script><script>alert(1)</script>"
ROOT = Path(__file__).resolve().parents[2]
VOID = {"meta", "br"}


class Tags(HTMLParser):
    """The open elements must close in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, str] = {}

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.named = dict(attributes).get("id", "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.texts[self.named or "code"] = data


def bad_run(folder: Path, **named: object) -> Path:
    """Parts at step 23, where its samples make a spike that an alert saw; rank 1 of stage 0 computes slowly from 20."""
    rows = [step_row(step, train__loss=loss_at(step) * (1.5 if step >= 23 else 1)) for step in range(1, 41)]
    events = [
        event(20, "checkpoint", second=10, bytes=10**6, checksum="ab"),
        event(23, "bad step", second=12, what="spike", samples=[176, 184]),
        event(24, "alert raised", second=13, alert="loss_spike", slice="stage 1", mitigation="lower train.lr"),
        event(20, "rollback", second=14, bad_step=23), event(26, "alert cleared", second=20, alert="loss_spike"),
    ]  # fmt: skip
    write_run(folder, rows=rows, events=events, **named)
    ranks = [{"rank": rank, "host": "ab"[rank], "pp": 0, "compute_s": 1.0 + rank} for rank in range(2)]
    ranks.append({"rank": 2, "host": "a", "pp": 0, "compute_s": 1.0})
    write_lines(folder / "ranks.jsonl", [{"step": 30, "time": "2026-01-01T00:00:30Z", "ranks": ranks}])
    return folder


def test_the_page_is_whole_opens_offline_and_shows_no_text_as_markup(tmp_path: Path) -> None:
    good = write_run(tmp_path / "a", identity={"git_commit": EVIL})
    bad = bad_run(tmp_path / "b", patch=f"diff --git a/x b/x\n+{EVIL}\n")
    out = tmp_path / "out" / "report.html"
    assert main([str(good), str(bad), "--out", str(out)]) == 0
    text = out.read_text()
    assert not re.search(r"https?:|//[a-z]|@import|<link|src=|href=", re.sub(r"^\s*//.*$", "", text, flags=re.M))
    assert EVIL not in text
    page = Tags()
    page.feed(text)
    assert page.open == []
    data = json.loads(page.texts["data"])
    assert data["runs"] == ["a", "b"]
    charts = {chart["key"]: chart for chart in data["charts"]}
    assert {"loss", "apart", "norm", "memory", "bubble", "exposed", "slowdown"} <= set(charts)
    assert [mark["x"]["step"] for mark in data["marks"]] == [23]
    curve = charts["loss"]["series"][1]
    assert curve["x"]["tokens"][22] == 23 * 2048 and curve["y"][22] == pytest.approx(1.5 * loss_at(23))
    assert [len(events) for events in data["events"]] == [1, 6]
    for words in ("loss parts at step 23", "before it in b", "what follows from them"):
        assert (words in text) == (words != "what follows from them")
    assert {path.name for path in out.parent.iterdir()} == {"report.html", "losses.png", "steps.png"}
    assert (out.parent / "losses.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("rows", [[], [step_row(1, train__loss=math.nan)], [step_row(1)]])
def test_one_run_alone_with_few_or_no_steps_has_a_report(rows: list, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert main([str(write_run(tmp_path / "a", rows=rows, ending=None)), "--out", str(out), "--incident"]) == 0
    assert "One run, one start" in out.read_text()


def test_runs_whose_losses_are_no_numbers_have_a_report(tmp_path: Path) -> None:
    rows = [step_row(step, train__loss=math.nan, train__grad_norm=math.inf) for step in (1, 2)]
    paths = [str(write_run(tmp_path / name, rows=rows)) for name in ("a", "b")]
    assert main([*paths, "--out", str(tmp_path / "report.html"), "--incident"]) == 0
    assert "the loss is not finite (nan)" in (tmp_path / "incident.md").read_text()


def test_the_recipe_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write_run(tmp_path / "a"))
    for words in ([str(tmp_path / "x")], [run, "--gate", str(tmp_path / "x")], [run, "--bisect"]):
        assert main([*words, *(["--out", str(tmp_path / "r.html")] if "--gate" not in words else [])]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1


def test_the_gate_is_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = str(write_run(tmp_path / "a")), str(bad_run(tmp_path / "b"))
    assert main([good, "--gate", good]) == 0
    assert "gate passed" in capsys.readouterr().out
    assert main([bad, "--gate", good]) == 0  # the parting is behind the twenty steps that are judged
    assert main([bad, "--gate", good, "--parity-steps", "40"]) == 1
    said = capsys.readouterr().out
    assert "gate parity FAILED: the loss of step 23" in said and "not judged until that is mended: memory" in said


def test_comparing_imports_neither_torch_nor_hydra_nor_wandb() -> None:
    code = "import sys, recipes.compare; print({'torch', 'hydra', 'wandb', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_long_curve_keeps_its_extremes_and_its_gaps() -> None:
    found = [{"step": float(n), "y": 100.0 if n == 777 else -1.0 if n == 5001 else 1.0} for n in range(10_000)]
    found[4000]["y"] = None
    thin = thinned(found, most=500)
    assert len(thin) < 600
    assert {100.0, -1.0, None} <= {one["y"] for one in thin}
    assert [one["step"] for one in thin] == sorted(one["step"] for one in thin)
    assert thinned(found[:500], most=500) == found[:500]


def test_points_are_in_the_charts_unit_and_gaps_where_nothing_is_finite(tmp_path: Path) -> None:
    rows = [step_row(1, train__mfu=0.5), step_row(2, train__mfu=math.inf)]
    run = load_run(write_run(tmp_path / "a", rows=rows))
    chart = next(chart for chart in CHARTS if chart.key == "utilisation")
    assert [one["y"] for one in points(run, chart, "train/mfu")] == [50.0, None]


def test_the_incident_record_is_filled_from_the_two_timelines(tmp_path: Path) -> None:
    good = load_run(write_run(tmp_path / "good"))
    bad = load_run(bad_run(tmp_path / "bad", config=plain_config(train__lr=0.1), identity={"git_commit": "f" * 40}))
    found = divergence(good, bad, tolerance_of([good, bad]))
    text = incident(good, bad, found)
    sections = dict(part.split("\n", 1) for part in text.split("## ")[1:])
    assert "step 23: bad step: what spike" in sections["Earliest known bad"]
    assert "time: 2026-01-01T00:00:12Z" in sections["Earliest known bad"]
    assert "until step 22 it agrees with good" in sections["Last known good"]
    for row in (f"| git_commit | 0123456789abcdef0123456789abcdef01234567 | {'f' * 40} |",
                "| **train.lr** (config) | 0.0003 | 0.1 |"):  # fmt: skip
        assert row in sections["Identities on either side"]
    slices = sections["Smallest affected slice"]
    assert "stage 1 (alert loss_spike" in slices and "samples 176 to 183" in slices
    assert "rank 1 on host b: computes 2.00 x as long" in slices
    assert f"good at step 23: loss {loss_at(23):.6g}" in sections["Known-good counterexample"]
    mitigates = sections["What mitigates"]
    assert "lower train.lr" in mitigates and "done: `2026-01-01T00:00:14Z" in mitigates
    assert "not confirmed" in sections["Cause"]
    assert "confirmed: config" in incident(good, bad, found, confirmed="config: train.lr")


def test_an_incident_between_two_starts_of_one_run_names_what_the_second_changed(tmp_path: Path) -> None:
    folder = bad_run(tmp_path / "bad")
    first = json.loads((folder / "starts" / "1.json").read_text())
    first["config"]["train"]["lr"] = 0.5
    (folder / "starts" / "2.json").write_text(json.dumps(first))
    lines = (folder / "timeline.jsonl").read_text().splitlines(keepends=True)
    again = [event(0, "start", second=11, start=2), event(22, "resume", second=11)]
    lines[2:2] = [json.dumps(one) + "\n" for one in again]
    (folder / "timeline.jsonl").write_text("".join(lines))
    text = incident(None, load_run(folder), None)
    assert "Start 1 of bad was good, start 2 is bad:" in text and "| **train.lr** (config) | 0.0003 | 0.5 |" in text


def test_without_trouble_there_is_no_incident(tmp_path: Path) -> None:
    assert "No sign of trouble" in incident(None, load_run(write_run(tmp_path / "a")), None)
