"""The stage split of a plan: the loads it is balanced by, and how it stands beside the uniform split.

Not here: the balancing (`parallel.stages`) and the measuring of layers (`engine.profile_layers`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from conf.schema import Config
from parallel.stages import Comparison, LayerSeconds, Load, compare_with_uniform, timed
from parallel.states import stage_loads

if TYPE_CHECKING:
    from parallel.plan import ParallelPlan


def loads(
    config: Config, *, dp: int, num_micro_batches: int, device: str, layer_seconds: LayerSeconds | None
) -> list[Load]:
    """Of each pipeline rank: predicted FLOPs, or nanoseconds where layers were measured."""
    found = stage_loads(config, dp=dp, num_micro_batches=num_micro_batches, device=device)
    if layer_seconds is None:
        return found
    return timed(found, layer_seconds, head_on=0 if config.parallel.schedule.value == "dualpipev" else -1)


def comparison(config: Config, plan: ParallelPlan, seconds: LayerSeconds | None) -> Comparison:
    """The plan's split beside the uniform one, by seconds of layers or, without, by FLOPs."""
    costs = loads(
        config, dp=plan.data_parallel_size, num_micro_batches=plan.num_micro_batches, device="cuda",
        layer_seconds=seconds,
    )  # fmt: skip
    last = config.model.num_layers + 2
    counts = [
        sum(0 < layer < last - 1 for stage in plan.stages_of(rank) for layer in range(*plan.stage_layers[stage]))
        for rank in range(plan.pipeline_model_parallel_size)
    ]
    return compare_with_uniform(counts, costs)


def describe(config: Config, plan: ParallelPlan, *, predicted: LayerSeconds | None = None) -> str:
    """One line: what the stages were cut by, the slowest one, and the uniform split's. FLOPs: of the forward pass.

    predicted: seconds of layers to judge by where none were measured.
    """
    seconds = plan.layer_seconds or predicted
    found = comparison(config, plan, seconds)
    by = "given by hand" if isinstance(config.parallel.stages, list) else "by predicted FLOPs"
    if seconds is not None:
        kind = "predicted" if plan.layer_seconds is None else "measured"
        ends = f"embedding {1e3 * seconds.embedding:.3g} ms, block {1e3 * seconds.block:.3g} ms"
        by = f"by {kind} times ({ends}, norm, head and loss {1e3 * seconds.head:.3g} ms)"
    unit, scale = ("GFLOP", 1e-9) if seconds is None else ("ms", 1e-6)
    text = f"{by}: slowest stage {found.slowest * scale:.3g} {unit} a micro-batch"
    if found.counts == found.uniform:
        return f"{text}, as uniform"
    uniform = ", ".join(map(str, found.uniform))
    return f"{text}; uniform split {uniform} blocks: {found.slowest_of_uniform * scale:.3g} {unit}, {found.gain:.2f} x"
