"""The engine on forked ranks: train a few steps under a plan and hand back what each rank saw."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from conf.schema import Config
from corpus.batches import micro_batches
from engine.build import build_trainer
from engine.device import this_device
from engine.distributed import start
from engine.schedules import learning_rate_at
from engine.step import StepResult, Trainer
from model.tensor_parallel.random import RandomStreams
from parallel.groups import Groups, open_groups
from parallel.plan import ParallelPlan
from tests.engine.cases import RandomTokens


def open_trainer(config: Config) -> tuple[Trainer, ParallelPlan, Groups, RandomStreams]:
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), DS_ACCELERATOR="cpu")
    plan = ParallelPlan.from_config(config, world_size)
    device = this_device()
    start(device, timeout_s=60)
    groups = open_groups(plan)
    streams = RandomStreams(tensor_rank=groups.tensor.rank, seed=config.seed)
    trainer = build_trainer(
        config, plan, groups, streams=streams, device=device, num_micro_batches=plan.num_micro_batches
    )
    return trainer, plan, groups, streams


def train_steps(config: Config, steps: int) -> list[StepResult]:
    """The results of `steps` steps on this rank."""
    torch.set_num_threads(1)
    trainer, plan, groups, streams = open_trainer(config)
    return [one_step(trainer, plan, groups, streams, config, step) for step in range(1, steps + 1)]


def one_step(
    trainer: Trainer, plan: ParallelPlan, groups: Groups, streams: RandomStreams, config: Config, step: int
) -> StepResult:
    dataset: Any = RandomTokens(vocab_size=config.model.vocab_size)
    first = (step - 1) * config.train.global_batch_size
    batches = micro_batches(dataset, plan=plan, first_sample=first, data_rank=groups.data.rank)
    streams.seed_step(seed=config.seed, step=step, data_rank=groups.data.rank, stage=groups.pipeline.rank)
    lr = learning_rate_at(config, step=step, tokens=0, total_tokens=0)
    return trainer.train_batch(batches if trainer.holds_data else None, lr=lr)
