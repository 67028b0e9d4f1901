"""The recipe from the command line: one folder, one wandb run, metrics and predictions (cases F1, G1)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.telemetry.wandb_files import stored

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
RECIPE = str(ROOT / "recipes" / "pretrain.py")
LAUNCHERS = {
    "python": [str(BIN / "python"), RECIPE],
    "local.sh": [str(ROOT / "launch" / "local.sh"), "-n", "4", RECIPE],
    "deepspeed": [str(BIN / "deepspeed"), "--num_gpus", "4", "--master_port", "29711", RECIPE],
    "torchrun": [str(BIN / "torchrun"), "--nproc-per-node", "4", "--master-port", "29712", RECIPE],
}


def write_corpus(folder: Path) -> None:
    """A jsonl of 400 short texts, read from a path relative to the calling folder."""
    (folder / "data").mkdir()
    lines = [json.dumps({"text": f"{n} plus {n} is {2 * n}. " * 5}) for n in range(400)]
    (folder / "data" / "x.jsonl").write_text("\n".join(lines))


def call(launcher: str, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
    fixed = [
        "model=llama_tiny",
        "data.sources=[{path: ./data/x.jsonl}]",
        "data.sequence_length=32",
        "train.train_iters=3",
    ]
    fixed += ["train.eval_interval=2", "train.eval_samples=6", "train.lr=3e-3"]
    return subprocess.run(
        [*LAUNCHERS[launcher], *fixed, *overrides],
        cwd=folder, env=environ | {"DS_ACCELERATOR": "cpu"}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def metrics(folder: Path) -> list[dict]:
    [run] = (folder / "runs" / "default").iterdir()
    assert (run / "complete.json").exists()
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "launcher",
    ["local.sh", pytest.param("deepspeed", marks=pytest.mark.slow), pytest.param("torchrun", marks=pytest.mark.slow)],
)
def test_four_ranks_leave_one_folder_one_wandb_run_and_the_numbers_of_one_rank(launcher: str, tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
        write_corpus(folder)
    done = call("python", alone, "train.sample_tokens=5")
    assert done.returncode == 0, done.stderr
    done = call(launcher, together, "parallel=tp1_pp2", "train.sample_tokens=5")
    assert done.returncode == 0, done.stdout + done.stderr
    one, four = metrics(alone), metrics(together)
    assert [row["step"] for row in four] == [0, 1, 2, 2, 3, 3]
    for name in ("train/loss", "train/grad_norm", "train/learning_rate", "validation/loss", "tokens"):
        assert [row[name] for row in four if name in row] == pytest.approx(
            [row[name] for row in one if name in row], rel=1e-5
        )
    [run] = (together / "runs" / "default").iterdir()
    rows, config, _ = stored(run)
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3]
    assert config["parallel"]["pp"] == 2
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["data_parallel_size"], len(plan["predicted_bytes"])) == (2, 4)
    check_profile(run, config, done.stdout)
    for part in (
        "validation loss",
        "tokens/s",
        "predicted and measured",
        "a sample of the model's own text",
        "metrics.jsonl",
    ):
        assert part in done.stdout
    sample = [line for line in done.stdout.splitlines() if line.startswith("    def ")]
    assert sample, done.stdout
    assert "Warning" not in done.stdout + done.stderr


def check_profile(run: Path, wandb_config: dict, output: str) -> None:
    """The profile is named everywhere; its prediction and what was measured are side by side (two stages)."""
    profile = json.loads((run / "run.json").read_text())["profile"]
    assert (profile["name"], profile["version"], len(profile["hash"])) == ("tp1_pp2", 1, 64)
    assert profile["standing"].startswith(("predicted only", "not observed here"))
    [start] = [row for row in map(json.loads, (run / "timeline.jsonl").open()) if row["event"] == "start"]
    assert (
        json.loads((run / "plan.json").read_text())["profile"] == start["profile"] == wandb_config["profile"] == profile
    )
    found = json.loads((run / "prediction.json").read_text())
    assert found["profile"] == profile and len(found["stages"]) == 2 and len(found["peak_bytes"]) == 4
    for stage in found["stages"]:
        for name in ("weights", "gradients", "master_weights", "optimizer_moments"):
            assert stage["memory"][name]["measured"] == stage["memory"][name]["predicted"] > 0
        assert stage["memory"]["activations"]["measured"] > 0
        assert 0 < stage["bubble"]["measured"] < 1 and stage["bubble"]["predicted"] is None
    assert found["step_s"]["measured"] > 0 and found["step_s"]["predicted"] is None
    assert "predicted and measured" in output and "measure them with recipes/probe.py" in output
    assert output.index("predicted and measured") < output.index("train loss")


def test_bad_text_is_one_line_with_file_and_row(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.jsonl").write_text('{"text": "fine"}\n{"text": "bro')
    done = call("python", tmp_path)
    assert done.returncode == 2
    assert "x.jsonl:2" in done.stderr and "Traceback" not in done.stderr


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    (tmp_path / "runs" / "default" / "taken").mkdir(parents=True)
    (tmp_path / "a-file").write_text("")
    for override, words in (("run.id=taken", "is another run's"), ("run.dir=a-file", "cannot be written")):
        done = call("python", tmp_path, override)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert words in done.stderr
    assert not list((tmp_path / "runs" / "default" / "taken").iterdir())


@pytest.mark.parametrize("override", ["run.id=../x", "run.experiment=a/b", "run.experiment="])
def test_run_names_are_one_folder_name(override: str, tmp_path: Path) -> None:
    done = call("python", tmp_path, override)
    assert done.returncode == 2 and done.stderr.startswith("error: run.")
