"""Real runs compared, once; and bisected, once: the planted difference is found and neither run's folder changes."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from recipes.compare import main
from tests.engine.test_pretrain import BIN, ROOT, call, write_corpus

COMPARE = str(ROOT / "recipes" / "compare.py")


def compare(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
    return subprocess.run(
        [str(BIN / "python"), COMPARE, *words], cwd=folder, env=environ | {"DS_ACCELERATOR": "cpu"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def state(folder: Path) -> dict[str, tuple[str, int]]:
    """Digest and time of change of every file, time of change of every folder."""
    return {
        str(path): (hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "", path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }


def test_two_runs_are_compared_from_their_folders_and_from_wandbs_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path)
    for name, rate in (("a", "3e-3"), ("b", "1e-3")):
        done = call("python", tmp_path, f"run.id={name}", f"train.lr={rate}", "train.sample_tokens=0")
        assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path / "runs" / "default")
    assert main(["a", "b"]) == 0
    said = capsys.readouterr().out
    assert "train.lr  0.003  |  0.001" in said
    assert "parts at step 2, after agreeing up to step 1" in said  # the first step's loss knows no rate
    assert Path("comparison/a+b/report.html").exists()
    [offline] = Path("b/wandb").glob("offline-run-*")
    assert main(["b", str(offline)]) == 0
    said = capsys.readouterr().out
    assert "agree at all 3 shared places" in said and "nothing differs" in said
    assert (main(["a", "--gate", "a"]), main(["b", "--gate", "a"])) == (0, 1)
    assert "gate parity FAILED" in capsys.readouterr().out


@pytest.mark.slow
def test_a_planted_config_difference_is_found_by_replays(tmp_path: Path) -> None:
    """Run b goes on from a's checkpoint of step 2 with another rate, and another knob that changes nothing."""
    write_corpus(tmp_path)
    fixed = ["train.train_iters=6", "train.sample_tokens=0", "checkpoint.interval=2", "checkpoint.keep_last=-1"]
    assert call("python", tmp_path, *fixed, "run.id=a").returncode == 0
    checkpoint = "runs/default/a/checkpoints/step-00000002"
    changed = ["run.id=b", f"resume={checkpoint}", "train.lr=1e-3", "cluster.name=elsewhere", "train.max_bad_steps=5"]
    assert call("python", tmp_path, *fixed, *changed).returncode == 0
    folders = [tmp_path / "runs" / "default" / name for name in ("a", "b")]
    before = [state(folder) for folder in folders]
    done = compare(tmp_path, *map(str, folders), "--bisect", "--incident")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [state(folder) for folder in folders] == before
    for name in ("a", "b"):
        assert f"{name}: its replay from step 2 draws its recorded curve again" in done.stdout
    assert "config: train.lr 0.003 -> 0.001: brings the difference, at step 4" in done.stdout
    assert "config: train.max_bad_steps 3 -> 5: does not bring the difference" in done.stdout
    assert "- confirmed: config: train.lr 0.003 -> 0.001" in (tmp_path / "comparison/a+b/incident.md").read_text()
