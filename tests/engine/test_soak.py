"""Ranks are killed at random instants, also in the middle of a save, while the plan changes from start to start.

SOAK_KILLS (4) ranks are killed with SIGKILL. At the end the loss curve must be the undisturbed one's, every checkpoint
that is left must pass its checksums, and no step may be missing. Undisturbed runs of different plans round differently
and drift apart, step by step; a disturbed run may be no further away than a few times that.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.checkpoint_folder import list_checkpoints, read_manifest
from engine.storage import Checksum, StoredTensors
from tests.engine.launched import LOCAL, ROOT, events_of, finish, start, steps_of, wait_for

KILLS = int(os.environ.get("SOAK_KILLS", "4"))
STEPS = 10 + 6 * KILLS
PRETRAIN = str(ROOT / "recipes" / "pretrain.py")
PLANS = [
    (1, ["parallel.tp=1"]),
    (2, ["parallel.tp=2", "zero.stage=0"]),
    (2, ["parallel.pp=2"]),
    (2, ["zero.stage=1"]),
    (2, ["zero.stage=3"]),
    (4, ["parallel.tp=2", "parallel.pp=2"]),
]
COMMON = [
    "model=llama_tiny", "data.sequence_length=32", "train.eval_interval=0", "telemetry.wandb.mode=disabled",
    "telemetry.plot=false", "run.id=r", f"train.train_iters={STEPS}", "train.lr=1e-4",
]  # fmt: skip


def losses(run: Path) -> dict[int, float]:
    """Loss by step; of a step that was trained again the last one."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


def undisturbed(folder: Path, ranks: int, plan: list[str]) -> dict[int, float]:
    folder.mkdir()
    code, output = finish(
        [str(LOCAL), "-n", str(ranks), PRETRAIN, *COMMON, *plan, "checkpoint.interval=0"], folder, timeout=900
    )
    assert code == 0, output
    return losses(folder / "runs" / "default" / "r")


def spread(one: dict[int, float], other: dict[int, float]) -> float:
    assert one.keys() == other.keys()
    return max(abs(one[step] - other[step]) / one[step] for step in one)


def ranks_of(launcher: psutil.Popen | Any) -> list[psutil.Process]:
    children = psutil.Process(launcher.pid).children(recursive=True)
    found = []
    for child in children:
        try:
            if any(word.startswith("--local_rank=") for word in child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def whole(path: Path) -> bool:
    manifest = read_manifest(path)
    checksums = [Checksum(**one) for one in manifest["checksums"]]
    return StoredTensors(path).damage(checksums, heads=manifest["heads"]) is None


def kill_one(process: Any, run: Path, chance: random.Random) -> str | None:
    """Kill one rank of the starting run: while it saves, or after some steps. None where it came to its end first."""
    trained = len(steps_of(run))
    saving = chance.random() < 0.5
    wanted = trained + chance.randrange(1, 7)

    def reached() -> bool:
        if process.poll() is not None:
            return True
        if len(steps_of(run)) < wanted:
            return False
        return not saving or any((run / "checkpoints").glob(".step-*.partial"))

    wait_for(reached, seconds=120, what="an instant to kill at")
    time.sleep(chance.random() * (0.02 if saving else 0.3))
    victims = ranks_of(process) if process.poll() is None else []
    if not victims:
        return None
    chance.choice(victims).send_signal(signal.SIGKILL)
    return "while saving" if saving else "while training"


@pytest.mark.slow
def test_soak(tmp_path: Path) -> None:
    chance = random.Random(int(os.environ.get("SOAK_SEED", "1")))
    reference = undisturbed(tmp_path / "one", 1, ["parallel.tp=1"])
    rounding = spread(reference, undisturbed(tmp_path / "four", *PLANS[-1]))
    folder = tmp_path / "soak"
    folder.mkdir()
    run = folder / "runs" / "default" / "r"
    kills: list[str] = []
    starts = 0
    while not (run / "complete.json").exists():
        ranks, plan = chance.choice(PLANS)
        began = time.monotonic()
        process = start([str(LOCAL), "-n", str(ranks), PRETRAIN, *COMMON, *plan, "checkpoint.interval=1"], folder)
        starts += 1
        killed = kill_one(process, run, chance) if len(kills) < KILLS else None
        struck = time.monotonic()
        code = process.wait(timeout=600)
        print(f"{ranks} ranks: struck after {struck - began:.1f} s, ended {time.monotonic() - struck:.1f} s later")
        output = (folder / "output.txt").read_text()
        if killed is not None:
            kills.append(killed)
        else:
            assert code == 0, output[-3000:]
        assert starts < 3 * KILLS + 10, output[-3000:]
    got = losses(run)
    assert list(got) == sorted(got) and set(got) == set(range(1, STEPS + 1))
    left = list_checkpoints(run / "checkpoints")
    for _, path in left:
        assert whole(path)
    resumes = [event["step"] for event in events_of(run) if event["event"] == "resume"]
    print(
        f"{len(kills)} kills ({kills.count('while saving')} while saving) in {starts} starts of {len(PLANS)} plans, "
        f"{len(resumes)} resumes, {STEPS} steps; largest relative difference of a loss {spread(reference, got):.1e}, "
        f"between two undisturbed plans {rounding:.1e}; {len(left)} checkpoints left, all whole"
    )
    assert len(kills) == KILLS
    assert spread(reference, got) <= max(5 * rounding, 1e-6)
