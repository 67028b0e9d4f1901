"""A run of two stages as its sinks have it: what wandb's page shows, TensorBoard's files, traces of a window."""

from __future__ import annotations

import json
from pathlib import Path

from engine.checkpoint_folder import MANIFEST, list_checkpoints
from tests.engine.launched import LOCAL, ROOT, TINY, events_of, finish
from tests.telemetry.wandb_reader import inspected

RECIPE = str(ROOT / "recipes" / "pretrain.py")
# A cluster that was measured, so that times are predicted and the schedule can be drawn.
ASKED = ["cluster=epyc_zen2_2cores", "train.train_iters=7", "checkpoint.interval=4", "telemetry.tensorboard=true"]


def test_a_run_shows_plan_schedule_checkpoints_and_profiled_steps_in_its_sinks(tmp_path: Path) -> None:
    command = [str(LOCAL), "-n", "2", RECIPE, *TINY, *ASKED, "telemetry.profile.steps=6-7"]
    code, output = finish(command, tmp_path)
    assert code == 0, output
    run = tmp_path / "runs" / "default" / "r"
    records = inspected(run)
    [identity] = [one["run"] for one in records if one["type"] == "run"]
    assert (identity["job_type"], identity["run_group"]) == ("pretrain", "default")
    assert {"tp1_pp2_dp1", "zero1", "1f1b", "llama_tiny", "fp32"} < set(identity["tags"])
    check_images(run, records, output)
    check_artifacts(run, records)
    summary = {name for one in records if one["type"] == "summary" for name in one["summary"].get("update", {})}
    assert {"predicted/step_s", "measured/step_s", "best/validation_loss"} <= summary
    check_profile(run, output)
    check_console(output)
    assert list((run / "tensorboard").glob("events.out.tfevents.*")) and str(run / "tensorboard") in output


def check_console(output: str) -> None:
    """Tables at the start, after the first five steps and at the end; between them a line a step or event."""
    lines = output[output.index("step      6/7") : output.index("train loss")].splitlines()
    noise = ("USDT:",)  # of the profiler's own library: two lines a window, on stderr
    assert all(line.startswith("step ") for line in lines if line and not line.startswith(noise))
    assert sum("ETA" in line for line in lines) == 2


def check_images(run: Path, records: list[dict], output: str) -> None:
    names = {"loss_curve": "loss.png", "predicted_schedule": "schedule.png"}
    stored = {name for one in records if one["type"] == "history" for name in one["history"]["item"]}
    for name, file in names.items():
        assert any(key.split(".")[0] == name for key in stored), name
        [kept] = (run / "wandb").glob(f"offline-run-*/files/media/images/{name}_*.png")
        assert kept.read_bytes() == (run / file).read_bytes() and str(run / file) in output


def check_artifacts(run: Path, records: list[dict]) -> None:
    artifacts = [one["artifact"] for one in records if one["type"] == "artifact"]
    told = {json.loads(one["metadata"])["step"]: json.loads(one["metadata"])["checksum"] for one in artifacts}
    checkpoints = list_checkpoints(run / "checkpoints")
    assert told == {step: json.loads((path / MANIFEST).read_text())["checksum"] for step, path in checkpoints}
    assert list(told) == [4, 7]


def check_profile(run: Path, output: str) -> None:
    [event] = [one for one in events_of(run) if one["event"] == "profiled"]
    assert (event["step"], event["first_step"], event["last_step"], event["overlaps"]) == (7, 6, 7, {})
    assert sorted(event["paths"]) == ["0", "1"], "the first rank of each stage"
    assert all((run / path).is_file() for path in event["paths"].values())
    assert "profiled steps 6 to 7: traces/rank-0-steps-6-7.pt.trace.json.gz" in output
    assert "no GPU kernels" in output, "why overlap is left out"
