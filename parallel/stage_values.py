"""How many values each rank of a pipeline stage holds, and which of them it trains.

All of them, or the adapters alone where lora.rank is set: then the rest is frozen, with neither gradient nor optimizer
state. Not here: bytes (`parallel.memory`), and what a plan's ranks send (`parallel.data_axis`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from conf.schema import Config
from parallel.adapters import block_adapters
from parallel.instructions import rank_of
from parallel.plan import ParallelPlan
from parallel.states import Tensors, block_tensors, end_tensors


def stage_parameters(config: Config, plan: ParallelPlan, pp_rank: int) -> int:
    """Values held by one rank of a stage: its shards and replicas, padded rows; a tied table once; adapters."""
    held = _model_tensors(config, plan, pp_rank).total
    return held + (trained_tensors(config, plan, pp_rank).total if config.lora.rank > 0 else 0)


def trained_parameters(config: Config, plan: ParallelPlan, pp_rank: int) -> int:
    """Values that one rank of a stage trains."""
    return trained_tensors(config, plan, pp_rank).total


def trained_tensors(config: Config, plan: ParallelPlan, pp_rank: int) -> Tensors:
    """Values of each parameter that one rank of a stage trains."""
    if config.lora.rank == 0:
        return _model_tensors(config, plan, pp_rank)
    blocks = sum(half_of(plan.stage_layers[stage], config.model.num_layers).blocks for stage in plan.stages_of(pp_rank))
    return block_adapters(config.model, config.lora, tp=plan.tensor_model_parallel_size).times(blocks)


def _model_tensors(config: Config, plan: ParallelPlan, pp_rank: int) -> Tensors:
    """Values of each parameter of the model itself on one rank of a stage."""
    tp = plan.tensor_model_parallel_size
    halves = [half_of(plan.stage_layers[stage], config.model.num_layers) for stage in plan.stages_of(pp_rank)]
    ends = end_tensors(
        config.model,
        tp=tp,
        padded_vocab_size=plan.padded_vocab_size,
        first=any(half.first for half in halves),
        last=any(half.last for half in halves),
    )
    return block_tensors(config.model, tp=tp).times(sum(half.blocks for half in halves)) + ends


class Half(NamedTuple):
    """What a stage holds (dualpipev: a rank has two)."""

    blocks: int
    first: bool
    last: bool


def half_of(span: tuple[int, int], num_layers: int) -> Half:
    low, high = span
    return Half(min(high, num_layers + 1) - max(low, 1), low == 0, high == num_layers + 3)


@lru_cache(maxsize=1024)  # a search asks again and again for the same cuts
def halves_of(
    stage_layers: tuple[tuple[int, int], ...], schedule: str, ranks: int, num_layers: int
) -> tuple[tuple[Half, ...], ...]:
    """What each pipeline rank holds."""
    held: list[list[Half]] = [[] for _ in range(ranks)]
    for stage, span in enumerate(stage_layers):
        held[rank_of(schedule, stage, ranks=ranks)].append(half_of(span, num_layers))
    return tuple(map(tuple, held))
