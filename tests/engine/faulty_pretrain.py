"""recipes/pretrain.py with one fault: FAULT=raise|exit|kill|hang|stop|slow strikes rank FAULT_RANK (2) before its
FAULT_STEP-th (third) step, once where FAULT_ONCE names a file that is not there yet; late: rank 1 comes two seconds
after the others. Started by tests.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from conf.cli import main
from conf.schema import Config
from parallel.plan import ParallelPlan


def _strikes(step: int) -> bool:
    once = os.environ.get("FAULT_ONCE")
    if step != int(os.environ.get("FAULT_STEP", "3")) or os.environ["RANK"] != os.environ.get("FAULT_RANK", "2"):
        return False
    if once is not None and Path(once).exists():
        return False
    if once is not None:
        Path(once).touch()
    return True


def run(config: Config, plan: ParallelPlan) -> int:
    if os.environ["FAULT"] == "late" and os.environ["RANK"] == "1":
        time.sleep(2)
    from engine.pipeline import PipelineTrainer
    from recipes import pretrain

    plain, steps = PipelineTrainer.train_batch, []

    def train_batch(self: PipelineTrainer, *arguments: Any, **named: Any) -> Any:
        steps.append(1)
        if os.environ["FAULT"] == "slow":
            time.sleep(float(os.environ.get("SLOW_S", "0.3")))
        elif os.environ["FAULT"] != "late" and _strikes(len(steps)):
            if os.environ["FAULT"] == "raise":
                raise RuntimeError("the fault that was asked for")
            if os.environ["FAULT"] == "exit":
                os._exit(3)
            if os.environ["FAULT"] == "hang":
                time.sleep(3600)
            os.kill(os.getpid(), signal.SIGSTOP if os.environ["FAULT"] == "stop" else signal.SIGKILL)
        return plain(self, *arguments, **named)

    PipelineTrainer.train_batch = train_batch  # type: ignore[method-assign]
    return pretrain.run(config, plan)


if __name__ == "__main__":
    main(run)
