"""The report: one HTML file that opens offline, pictures, the incident's record, and the recipe around them."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from recipes import compare
from recipes.compare import folder_name, main
from telemetry.compare.curves import CHARTS, points, thinned
from telemetry.compare.markdown import shown_text
from telemetry.compare.runs import load_run
from tests.telemetry.run_folders import bad_run, loss_at, step_row, write_run

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


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--rules", "r.yaml"], "--rules is for --alerts"),
        (["--bisect-from", "3"], "--bisect-from is for --bisect"),
        (["--gate", "RUN", "--bisect"], "--gate stands alone; leave out --bisect"),
        (["--gate", "RUN", "--incident"], "--gate stands alone; leave out --incident"),
        (["--alerts", "--incident", "--bisect"], "--alerts stands alone; leave out --bisect and --incident"),
        (["--alerts", "--rules", "nowhere.yaml"], "--rules nowhere.yaml: there is no such file"),
    ],
)
def test_an_option_that_would_be_passed_over_is_refused(
    words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(write_run(tmp_path / "a"))
    assert main([run, *(run if word == "RUN" else word for word in words)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {line}") and error.count("\n") == 1


def test_alert_rules_are_not_evaluated_over_wandbs_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run-r1.wandb").write_text("")
    assert main(["--alerts", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "holds wandb's files" in error and error.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_it_by_the_way_out(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is open is closed, once: a second signal does not break that off."""
    closed, before = [], signal.getsignal(number)

    def play(asked: object) -> int:
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), number)
            closed.append(True)
        return 0

    monkeypatch.setattr(compare, "run", play)
    assert main([str(tmp_path)]) == 128 + number
    assert closed == [True] and signal.getsignal(number) == before


def test_a_record_is_shown_with_its_tables_and_no_text_of_a_run_as_markup() -> None:
    text = f"# Incident: a\n\n## Signs\n- `x` **b** {EVIL}\n\n| | good |\n|---|---|\n| key | a\\|b |\n"
    shown = shown_text(text)
    assert "<h3>Signs</h3><ul><li><code>x</code> <b>b</b> &lt;/script&gt;" in shown
    assert "<td class=value>a|b</td>" in shown and "<script" not in shown and "|---" not in shown
    assert shown_text("replayed | <b>") == "<pre>replayed | &lt;b&gt;</pre>"


def test_more_runs_than_colors_are_told_apart_by_dashes_and_only_some_findings_are_open(tmp_path: Path) -> None:
    paths = [str(write_run(tmp_path / f"r{n}", rows=[step_row(1), step_row(2)])) for n in range(10)]
    assert main([*paths, "--out", str(tmp_path / "report.html")]) == 0
    text = (tmp_path / "report.html").read_text()
    assert text.count('class="swatch dash1"') == 2 and "<summary>5 more</summary>" in text


def test_a_folders_name_has_no_separator_and_copies_are_told_apart() -> None:
    assert folder_name(["a (x/a)", "a (y/a)"]) == "a__x_a+a__y_a"
    assert "/" not in folder_name(["../b/c" * 60, "b"]) and len(folder_name(["b" * 300, "c"])) < 255


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
