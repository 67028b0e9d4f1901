"""recipes/pretrain.py with one fault: FAULT=raise|exit|kill strikes rank 2 before its third step. Started by tests."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from conf.cli import main
from conf.schema import Config
from parallel.plan import ParallelPlan


def run(config: Config, plan: ParallelPlan) -> int:
    from engine.pipeline import PipelineTrainer
    from recipes import pretrain

    plain, steps = PipelineTrainer.train_batch, []

    def train_batch(self: PipelineTrainer, *arguments: Any, **named: Any) -> Any:
        steps.append(1)
        if len(steps) == 3 and os.environ["RANK"] == "2":
            if os.environ["FAULT"] == "raise":
                raise RuntimeError("the fault that was asked for")
            if os.environ["FAULT"] == "exit":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, *arguments, **named)

    PipelineTrainer.train_batch = train_batch  # type: ignore[method-assign]
    return pretrain.run(config, plan)


if __name__ == "__main__":
    main(run)
