"""A recipe that writes what each rank was given; without torch, so that a launch of it is short."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from conf.cli import main
from conf.load import to_plain
from conf.schema import Config
from parallel.plan import ParallelPlan


def run(config: Config, plan: ParallelPlan) -> int:
    rank = os.environ["RANK"]
    shown = {
        "config": to_plain(config), "environ": dict(os.environ), "host": socket.gethostname(),
        "folder": os.getcwd(), "of": plan.world_size,
    }  # fmt: skip
    Path(f"rank-{rank}.part").write_text(json.dumps(shown))
    os.replace(f"rank-{rank}.part", f"rank-{rank}.json")
    if config.run.experiment == "waits":
        while not Path("go").exists():
            time.sleep(0.1)
    return 0


if __name__ == "__main__":
    main(run)
