"""A stand-in for launch/local.sh, to be copied under that name: a run in a tenth of a second, written by tests.

`seed` says what becomes of it: 13 fails, 60 waits for signals, others finish. It appends to ./events when it begins and
ends, with the time and what its environment holds; its loss is (log10(train.lr) + 3)^2.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from pathlib import Path

SHOWN = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "WANDB_RUN_ID", "MASTER_PORT")


def event(kind: str, run: str, ranks: int) -> None:
    row = {"time": time.monotonic(), "kind": kind, "run": run, "ranks": ranks, "words": sys.argv[4:]}
    with Path("events").open("a") as file:
        file.write(json.dumps(row | {name: os.environ.get(name) for name in SHOWN}) + "\n")


def main() -> int:
    assert sys.argv[1] == "-n" and sys.argv[3].endswith("recipes/pretrain.py")
    values = dict(word.split("=", 1) for word in sys.argv[4:])
    run, ranks, seed = values["run.id"], int(sys.argv[2]), values.get("seed")
    folder = Path("runs") / values["run.experiment"] / run
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"id": run}))
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda n, frame: asked.append(n))
    event("begins", run, ranks)
    end = time.monotonic() + (60 if seed == "60" else 0.2)
    while time.monotonic() < end and not asked:
        time.sleep(0.02)
    if values.get("telemetry.wandb.group") == "slow_save":
        while len(asked) < 2:
            time.sleep(0.02)
    code = 3 if seed == "13" else 130 if len(asked) > 1 else 75 if asked else 0
    print("step 1\nerror: it was to fail\nbye" if seed == "13" else "step 1")
    if code == 0:
        loss = (math.log10(float(values.get("train.lr", "1e-3"))) + 3) ** 2
        rows = [{"step": 1, "train/loss": 9.0}, {"step": 1, "validation/loss": loss}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    event("ends", run, ranks)
    return code


if __name__ == "__main__":
    sys.exit(main())
