"""recipes/prepare.py from a folder of its own: the table, the exit codes, one line for what is refused."""

import subprocess
import sys
from pathlib import Path

from tests.corpus.helpers import write_jsonl

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "prepare.py"


def run(folder, *overrides):
    command = [sys.executable, str(RECIPE), "data.sequence_length=8", *overrides]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_a_relative_corpus_is_prepared_where_the_call_was_made(tmp_path):
    write_jsonl(tmp_path / "x.jsonl", [f"document {i}" for i in range(100)] + [""])
    done = run(tmp_path, "data.sources=[{path: x.jsonl}]", "data.validation_fraction=0.2")
    assert done.returncode == 0, done.stderr
    assert "x.jsonl: 101 rows, left out 1 empty" in done.stdout and str(tmp_path / "runs" / "corpus") in done.stdout
    assert len(list((tmp_path / "runs" / "corpus").glob("x.jsonl-*/manifest.json"))) == 1


def test_a_broken_corpus_ends_with_code_2_and_one_line(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": ')
    done = run(tmp_path, "data.sources=[{path: x.jsonl}]")
    assert done.returncode == 2
    what = "broken JSON (Expecting value at character 10); mend it or set data.bad_lines=skip"
    assert done.stderr.splitlines() == [f"error: {tmp_path}/x.jsonl:2: {what}"]
