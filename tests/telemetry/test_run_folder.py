"""A run's starts are kept whole, and its code can be had back: commit and patch."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from telemetry import run_folder
from telemetry.run_folder import git_changes, git_commit, write_start
from telemetry.timeline import Timeline


def read(path: Path):
    return json.loads(path.read_text())


def test_each_start_is_kept_and_the_newest_stands_on_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "git_changes", lambda: "")
    first = write_start(tmp_path, {"id": "a", "command": "one"}, config={"seed": 1}, plan={"tp": 1})
    second = write_start(tmp_path, {"id": "a", "command": "two"}, config={"seed": 2}, plan={"tp": 2})
    assert (first, second) == (1, 2)
    assert read(tmp_path / "run.json") == {"id": "a", "command": "one", "start": 1}
    assert read(tmp_path / "config.json") == {"seed": 2} and read(tmp_path / "plan.json") == {"tp": 2}
    assert read(tmp_path / "starts" / "1.json") == {
        "identity": {"id": "a", "command": "one", "start": 1}, "config": {"seed": 1}, "plan": {"tp": 1},
    }  # fmt: skip
    assert read(tmp_path / "starts" / "2.json")["config"] == {"seed": 2}
    assert not list((tmp_path / "starts").glob("*.patch"))


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    return subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A checkout that run_folder takes for its own."""
    checkout = tmp_path / "code"
    (checkout / "telemetry").mkdir(parents=True)
    git(checkout, "init", "-q")
    (checkout / "a.py").write_text("x = 1\n")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "one")
    monkeypatch.setattr(run_folder, "__file__", str(checkout / "telemetry" / "run_folder.py"))
    git_commit.cache_clear()
    yield checkout
    git_commit.cache_clear()


def test_the_patch_brings_a_checkout_of_the_commit_to_the_code_that_ran(code: Path, tmp_path: Path) -> None:
    (code / "a.py").write_bytes("x = 'é'\n".encode("latin-1"))
    (code / "b.bin").write_bytes(bytes(range(256)))
    git(code, "add", "b.bin")
    (code / "new.py").write_text("y = 3\n")
    (code / "data.txt").write_text("not code\n")
    commit = git_commit()
    assert commit is not None and commit.endswith("+changes")
    folder = tmp_path / "run"
    folder.mkdir()
    write_start(folder, {"id": "a"}, config={})
    assert git(code, "status", "--porcelain").splitlines() == [" M a.py", "A  b.bin", "?? data.txt", "?? new.py"]
    (code / "new.py").unlink()
    git(code, "stash", "-q")
    git(code, "apply", str(folder / "starts" / "1.patch"))
    assert (code / "a.py").read_bytes() == b"x = '\xe9'\n" and (code / "b.bin").read_bytes() == bytes(range(256))
    assert (code / "new.py").read_text() == "y = 3\n"


def test_a_clean_checkout_leaves_no_patch(code: Path) -> None:
    assert git_commit() == git(code, "rev-parse", "HEAD").strip() and git_changes() == ""


def test_no_secret_reaches_a_file(code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    (code / "a.py").write_text(f"key = '{secret}'\n")
    folder = tmp_path / "run"
    folder.mkdir()
    write_start(folder, {"id": "a", "command": f"python train.py tags=[{secret}]"}, config={"tags": [secret]})
    Timeline(folder / "timeline.jsonl").add("start", step=0, command=f"x {secret}")
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert len(written) == 5 and not [path for path in written if secret in path.read_text()]
