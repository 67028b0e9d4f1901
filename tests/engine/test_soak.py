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
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.checkpoint_folder import list_checkpoints, read_manifest
from engine.distributed import free_port
from engine.storage import Checksum, StoredTensors
from tests.engine.launched import ROOT, events_of, start, steps_of, wait_for

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


def start_ranks(folder: Path, ranks: int, *options: str) -> list[subprocess.Popen[str]]:
    """The ranks of one start, without a launcher: nobody ends the others for them when one is killed."""
    port = str(free_port())
    environ = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, PRETRAIN, *COMMON, *options, "resume=auto"]
    return [start(command, folder, **environ, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(ranks)]


def undisturbed(folder: Path, ranks: int, plan: list[str]) -> dict[int, float]:
    folder.mkdir()
    codes = [process.wait(timeout=900) for process in start_ranks(folder, ranks, *plan, "checkpoint.interval=0")]
    assert codes == [0] * ranks, (folder / "output.txt").read_text()
    return losses(folder / "runs" / "default" / "r")


def spread(one: dict[int, float], other: dict[int, float]) -> float:
    assert one.keys() == other.keys()
    return max(abs(one[step] - other[step]) / one[step] for step in one)


def whole(path: Path) -> bool:
    manifest = read_manifest(path)
    checksums = [Checksum(**one) for one in manifest["checksums"]]
    return StoredTensors(path).damage(checksums, heads=manifest["heads"]) is None


def kill_one(processes: list[subprocess.Popen[str]], run: Path, chance: random.Random) -> str | None:
    """Kill one of the starting ranks: while they save, or after some steps. None where they came to their end first."""
    trained = len(steps_of(run))
    saving = chance.random() < 0.5
    wanted = trained + chance.randrange(1, 5)

    def reached() -> bool:
        if any(process.poll() is not None for process in processes):
            return True
        if len(steps_of(run)) < wanted:
            return False
        return not saving or any((run / "checkpoints").glob(".step-*.partial"))

    wait_for(reached, seconds=180, what="an instant to kill at")
    time.sleep(chance.random() * (0.02 if saving else 0.3))
    victim = chance.choice(processes)
    if victim.poll() is not None:
        return None
    victim.send_signal(signal.SIGKILL)
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
    endings: list[float] = []
    starts = 0
    while not (run / "complete.json").exists():
        ranks, plan = chance.choice(PLANS)
        processes = start_ranks(folder, ranks, *plan, "checkpoint.interval=1")
        starts += 1
        killed = kill_one(processes, run, chance) if len(kills) < KILLS else None
        struck = time.monotonic()
        codes = [process.wait(timeout=120 if killed else 900) for process in processes]
        output = (folder / "output.txt").read_text()
        if killed is not None:
            kills.append(killed)
            endings.append(time.monotonic() - struck)
            assert all(codes), f"a rank left with 0 although one was killed: {codes}"
        else:
            assert codes == [0] * ranks, output[-3000:]
        assert starts < 3 * KILLS + 10, output[-3000:]
    got = losses(run)
    assert list(got) == sorted(got) and set(got) == set(range(1, STEPS + 1))
    left = list_checkpoints(run / "checkpoints")
    assert left and all(whole(path) for _, path in left)
    resumes = sum(event["event"] == "resume" for event in events_of(run))
    print(
        f"{len(kills)} kills ({kills.count('while saving')} while saving) in {starts} starts of {len(PLANS)} plans, "
        f"{resumes} resumes, {STEPS} steps; the other ranks were gone after {max(endings, default=0.0):.1f} s at the "
        f"most; largest relative difference of a loss {spread(reference, got):.1e}, between two undisturbed plans "
        f"{rounding:.1e}; {len(left)} checkpoints left, all whole"
    )
    assert len(kills) == KILLS
    assert spread(reference, got) <= max(5 * rounding, 1e-6)
