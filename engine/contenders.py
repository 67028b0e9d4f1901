"""What recipes/benchmark.py measures: our plans by name, and for each mesh programs of other packages that fit it."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Sequence

import torch

from conf.schema import Config, Family, ParallelConfig, Schedule
from corpus.batches import Batch
from engine.build import build_trainer
from engine.device import this_device
from engine.distributed import start
from engine.measure import Contender, Step
from engine.peers import torch_loop, transformers_ddp, transformers_loop
from engine.peers_deepspeed import transformers_autotp, transformers_pipeline, transformers_zero1
from engine.peers_dtensor import transformers_dtensor
from model.tensor_parallel.random import RandomStreams
from parallel.groups import open_groups
from parallel.plan import ParallelPlan

Mesh = tuple[int, int, int]  # tp, pp, dp


def ours(config: Config, plan: ParallelPlan) -> Step:
    """A step of the trainer that recipes/pretrain.py runs."""
    device = this_device()
    start(device, timeout_s=config.cluster.timeout_s)
    torch.use_deterministic_algorithms(config.train.deterministic, warn_only=True)
    groups = open_groups(plan)
    streams = RandomStreams(tensor_rank=groups.tensor.rank, device=device.torch_device, seed=config.seed)
    trainer = build_trainer(
        config, plan, groups, streams=streams, device=device, num_micro_batches=plan.num_micro_batches
    )

    def step(batches: Sequence[Batch]) -> float:
        return trainer.train_batch(batches if trainer.holds_data else None, lr=config.train.lr).loss

    return step


PARTS = {"tp": r"tp(\d+)", "pp": r"pp(\d+)", "dp": r"dp(\d+)", "zero": r"zero([0-3])"}


def plan_config(name: str, config: Config) -> tuple[Config, Mesh]:
    """`config` split as a name such as "tp2_pp2_zero1_sp" says, and its mesh.

    Raises ValueError where the name has a part that is none of tpN, ppN, dpN, zeroN, sp, a schedule.
    """
    numbers = {"tp": 1, "pp": 1, "dp": 1, "zero": 0}
    parallel = ParallelConfig(name=name, recompute=config.parallel.recompute)
    for part in name.split("_"):
        found = {key: match for key, pattern in PARTS.items() if (match := re.fullmatch(pattern, part))}
        for key, match in found.items():
            numbers[key] = int(match[1])
        if part == "sp":
            parallel.sequence_parallel = True
        elif part in {schedule.value for schedule in Schedule}:
            parallel.schedule = Schedule(part)
        elif not found:
            raise ValueError(
                f"benchmark.plans: {part!r} of {name!r} is not known; join tpN, ppN, dpN, zeroN, sp, eager1f1b by _"
            )
    parallel.tp, parallel.pp = numbers["tp"], numbers["pp"]
    split = copy.deepcopy(config)
    split.parallel, split.zero.stage = parallel, numbers["zero"]
    return split, (numbers["tp"], numbers["pp"], numbers["dp"])


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
