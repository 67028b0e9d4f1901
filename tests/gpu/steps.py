"""Five steps of the tiny model on this process's CUDA device, as one line of JSON: python -m tests.gpu.steps CASE"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from conf.schema import DType, Recompute

CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    **{f"fp32-zero{stage}": {"zero__stage": stage} for stage in (1, 2, 3)},
    "bf16": {"precision__dtype": DType.bf16, "zero__stage": 1},
    "fp16": {"precision__dtype": DType.fp16, "zero__stage": 1, "precision__initial_loss_scale_power": 8},
    "fp16-overflow": {"precision__dtype": DType.fp16, "zero__stage": 1, "precision__initial_loss_scale_power": 30},
    **{f"memory-{mode.value}": {"parallel__recompute": mode} for mode in Recompute},
}
NAMES = tuple(CASES)
STEPS = {"fp16-overflow": 40}


def main(name: str) -> None:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    from corpus.batches import micro_batches
    from engine.build import build_trainer
    from engine.device import this_device
    from engine.distributed import start, stop
    from engine.schedules import learning_rate_at
    from model.tensor_parallel.random import RandomStreams
    from parallel.groups import open_groups
    from parallel.plan import ParallelPlan
    from tests.engine.cases import RandomTokens, tiny_config

    config = tiny_config(**CASES[name])
    plan = ParallelPlan.from_config(config, 1, device="cuda")
    device = this_device()
    start(device, timeout_s=60)
    streams = RandomStreams(tensor_rank=0, device=device.torch_device, seed=config.seed)
    trainer = build_trainer(
        config, plan, open_groups(plan), streams=streams, device=device, num_micro_batches=plan.num_micro_batches
    )
    dataset: Any = RandomTokens(vocab_size=config.model.vocab_size)
    rows = []
    for step in range(1, STEPS.get(name, 5) + 1):
        batches = micro_batches(dataset, plan=plan, first_sample=(step - 1) * 8, data_rank=0)
        streams.seed_step(seed=config.seed, step=step, data_rank=0, stage=0)
        result = trainer.train_batch(batches, lr=learning_rate_at(config, step=step, tokens=0, total_tokens=0))
        scale = getattr(trainer.engine.optimizer, "loss_scale", None)
        rows.append(
            {
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "skipped": result.skipped,
                "loss_scale": scale,
                "peak_bytes": torch.cuda.max_memory_allocated(),
            }
        )
    print(json.dumps(rows))
    stop()


if __name__ == "__main__":
    main(sys.argv[1])
