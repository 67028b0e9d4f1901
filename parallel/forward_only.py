"""A config for forward passes alone: what only training has stands at values that ask for nothing.

ZeRO stage, schedule, sequence parallelism, recomputation and global batch say how gradients and states are made and
kept, so none of them may refuse a plan that evaluates or generates, or change it. What is left: tp, pp, the split into
stages, the order of the axes.
"""

from __future__ import annotations

from dataclasses import replace

from conf.schema import Config, Recompute, Schedule, ZeroConfig
from parallel.objectives import objective_of


def forward_only(config: Config, *, world_size: int) -> Config:
    """The same model, data and degrees; the micro-batch is what one data rank computes at once, the objective what the
    family learns."""
    parallel, train = config.parallel, config.train
    dp = max(1, world_size // max(1, parallel.tp * parallel.pp))
    return replace(
        config,
        objective=objective_of(config.model.family),
        parallel=replace(
            parallel,
            sequence_parallel=False,
            schedule=Schedule["1f1b"],
            stages=None if parallel.stages == "profile" else parallel.stages,
            recompute=Recompute.none,
            recompute_interval=1,
        ),
        zero=ZeroConfig(),
        train=replace(train, global_batch_size=train.micro_batch_size * dp, batch_ramp_up=None),
    )
