"""What would bring a plan's worst stage under a limit: one change at a time, each predicted anew.

A line names the stage that decides, then each change with its bytes before and after. Not here: combinations of
changes and their price in time (a search's work).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from conf.schema import Config, Recompute
from parallel.ledger import Ledger
from parallel.memory import predict, worst
from parallel.plan import ParallelPlan, PlanError

GB = 1e9
WORTH_SAYING = 0.01  # share of the total that a change must save


def worst_stage(config: Config, world_size: int, *, device: str | None = None) -> Ledger:
    """The ledger of the stage that needs most, under the config's plan; PlanError where there is none."""
    return worst(predict(config, ParallelPlan.from_config(config, world_size, device=device), device=device))


def advice(config: Config, world_size: int, limit_bytes: int, *, device: str | None = None) -> list[str]:
    """Lines: the worst stage, and single changes that a plan allows, those that fit first; [] where the plan fits."""
    ledger = worst_stage(config, world_size, device=device)
    if ledger.total <= limit_bytes:
        return []
    tried = []
    for settings, changed in _changes(config, world_size):
        try:
            total = worst_stage(changed, world_size, device=device).total
        except PlanError:
            continue  # the plan's rules refuse it
        if total < ledger.total * (1 - WORTH_SAYING):
            tried.append((total, settings))
    lines = [_named(ledger, limit_bytes)]
    for total, settings in sorted(tried):
        verdict = "fits" if total <= limit_bytes else "not enough by itself"
        lines.append(f"{settings}: {ledger.total / GB:.1f} -> {total / GB:.1f} GB, {verdict}")
    if not tried:
        lines.append("no single change of plan lowers it; use more ranks, or a smaller model or sequence")
    return lines


def _named(ledger: Ledger, limit_bytes: int) -> str:
    parts = sorted(ledger.categories().items(), key=lambda part: -part[1])[:3]
    most = ", ".join(f"{name} {size / GB:.1f}" for name, size in parts)
    excess = ledger.total - limit_bytes
    return (
        f"stage {ledger.pp_rank} needs {ledger.total / GB:.1f} GB, {excess / GB:.1f} GB more than the limit of "
        f"{limit_bytes / GB:.1f} GB; most: {most} GB"
    )


def _changes(config: Config, world_size: int) -> Iterator[tuple[str, Config]]:
    """(the knobs as they are typed, the changed config), one change each."""
    parallel, train = config.parallel, config.train

    def one(section: str, text: str = "", **fields: Any) -> tuple[str, Config]:
        changed = replace(config, **{section: replace(getattr(config, section), **fields)})
        shown = (f"{section}.{name}={_shown(value)}" for name, value in fields.items() if name != "stages")
        return text or " ".join(shown), changed

    if parallel.recompute is Recompute.none:
        yield one("parallel", recompute=Recompute.selective)
    if parallel.recompute is not Recompute.full:
        yield one("parallel", recompute=Recompute.full)
    if not parallel.sequence_parallel and parallel.tp > 1:
        yield one("parallel", sequence_parallel=True)
    if parallel.schedule.value != "1f1b":
        yield one("parallel", schedule=type(parallel.schedule)("1f1b"), stages=None)
    if train.micro_batch_size > 1:
        yield one("train", micro_batch_size=_next_divisor(train.micro_batch_size))
    spread = world_size > parallel.tp * parallel.pp  # else there is nobody to share states with
    for stage in range(config.zero.stage + 1, 4) if spread else ():
        yield one("zero", stage=stage)
    if config.zero.stage > 0 and not config.zero.offload_optimizer:
        yield one("zero", offload_optimizer=True)
    # By hand, stages hold for one pp only.
    yield one("parallel", tp=2 * parallel.tp)
    yield one("parallel", pp=2 * parallel.pp, stages=None)


def _next_divisor(n: int) -> int:
    """The largest proper divisor: the micro-batch still divides what it divided."""
    return max(k for k in range(1, n) if n % k == 0)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(getattr(value, "value", value))
