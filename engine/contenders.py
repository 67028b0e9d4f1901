"""What recipes/benchmark.py measures: our plans by name, and for each mesh programs of other packages that fit it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch

from conf.schema import Config, Family
from corpus.batches import Batch
from engine.build import build_trainer
from engine.device import this_device
from engine.distributed import start
from engine.first_steps import LAST
from engine.measure import Contender, Step
from engine.meters import Meters
from engine.peers import torch_loop, transformers_ddp, transformers_loop
from engine.peers_deepspeed import transformers_autotp, transformers_pipeline, transformers_zero1
from engine.peers_dtensor import transformers_dtensor
from engine.step import Trainer
from model.tensor_parallel.random import RandomStreams
from parallel.groups import open_groups
from parallel.plan import ParallelPlan
from parallel.plan_name import Mesh, plan_config


def ours(config: Config, plan: ParallelPlan) -> Step:
    """A step of the trainer that recipes/pretrain.py runs."""
    trainer, _ = _opened(config, plan)

    def step(batches: Sequence[Batch]) -> float:
        return trainer.train_batch(batches if trainer.holds_data else None, lr=config.train.lr).loss

    return step


def with_telemetry(config: Config, plan: ParallelPlan) -> Step:
    """The same inside the meters of recipes/pretrain.py: every step clocked, all ranks heard in each."""
    trainer, session = _opened(config, plan)
    first: Any = SimpleNamespace(count=LAST + 1, watch=lambda trainer: nullcontext())
    meters = Meters(session, first, interval=1, memory_before=0, ledger=())
    steps = count(1)

    def step(batches: Sequence[Batch]) -> float:
        start = session.device.now()
        with meters.watch(trainer, next(steps)):
            loss = trainer.train_batch(batches if trainer.holds_data else None, lr=config.train.lr).loss
        meters.hear(session.device.now() - start)
        return loss

    return step


def _opened(config: Config, plan: ParallelPlan) -> tuple[Trainer, Any]:
    """The trainer, and what meters need of a session."""
    device = this_device()
    start(device, timeout_s=config.cluster.timeout_s)
    torch.use_deterministic_algorithms(config.train.deterministic, warn_only=True)
    groups = open_groups(plan)
    streams = RandomStreams(tensor_rank=groups.tensor.rank, device=device.torch_device, seed=config.seed)
    trainer = build_trainer(
        config, plan, groups, streams=streams, device=device, num_micro_batches=plan.num_micro_batches
    )
    hosts, control = [""] * plan.world_size, torch.distributed.new_group(backend="gloo")
    rank = torch.distributed.get_rank()
    return trainer, SimpleNamespace(
        groups=groups, device=device, plan=plan, rank=rank, hosts=hosts, control=control
    )  # fmt: skip


def comparisons(config: Config) -> list[tuple[list[Contender], list[Contender]]]:
    """(our plans, their peers) for each mesh of `benchmark.plans`, in the order of the plans.

    Raises PlanError or ValueError on a plan that cannot be.
    """
    by_mesh: dict[Mesh, list[Contender]] = {}
    for name in config.benchmark.plans:
        split, mesh = plan_config(name, config)
        ranks = math.prod(mesh)
        ParallelPlan.from_config(split, ranks, device=this_device().kind)
        by_mesh.setdefault(mesh, []).append(Contender(name=f"ours {name}", config=split, ranks=ranks, open=ours))
    if config.benchmark.telemetry:
        return [(own, [replace(one, name=f"{one.name}, telemetry", open=with_telemetry) for one in own])
                for own in by_mesh.values()]  # fmt: skip
    return [(own, peers(config, mesh)) for mesh, own in by_mesh.items()]


def peers(config: Config, mesh: Mesh) -> list[Contender]:
    """Programs of other packages on this mesh; none for a family, mix of axes or masked documents they do not have."""
    tp, pp, dp = mesh
    programs: dict[str, Callable[[Config, ParallelPlan], Step]] = {}
    if tp == pp == dp == 1:
        programs = {"torch loop": torch_loop, "transformers loop": transformers_loop}
    elif tp == pp == 1:
        programs = {"transformers DDP": transformers_ddp, "transformers DeepSpeed ZeRO-1": transformers_zero1}
    elif tp == dp == 1:
        programs = {"transformers DeepSpeed PipelineModule": transformers_pipeline}
    elif pp == dp == 1:
        programs = {"transformers DTensor": transformers_dtensor, "transformers DeepSpeed AutoTP": transformers_autotp}
    if not config.benchmark.peers or config.data.mask_documents or config.model.family is not Family.llama:
        return []
    split, _ = plan_config(f"tp{tp}_pp{pp}_dp{dp}", config)
    return [Contender(name=name, config=split, ranks=tp * pp * dp, open=program) for name, program in programs.items()]
