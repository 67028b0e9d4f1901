"""The ladder that leads to a profile's promotion: one device, each dimension alone, all together, and restarts.

Pure: what each rung changes on the command line, and on how many ranks it runs. Not here: running them
(`engine.ladder`) and what they must show (`parallel.promotion`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from conf.schema import Config, ParallelConfig
from parallel import rules
from parallel.record import plain

BASELINE = "one device"
COMPOSED = "composed"
WHOLE = "whole model"


@dataclass(frozen=True)
class Rung:
    """overrides: behind the profile's own; resumes: the rung from whose checkpoint it goes on; baseline: the rung whose
    losses it must draw (its own: finite ones); timed: whether its step time counts."""

    name: str
    ranks: int
    overrides: tuple[str, ...]
    resumes: str | None = None
    baseline: str = BASELINE
    timed: bool = False


def rungs(config: Config, *, ranks: int, device: str | None) -> list[Rung]:
    """From one device up to all of `ranks`. Raises ValueError with every reason why a rung cannot be planned.

    Data parallelism is climbed on two ranks where the whole plan leaves the data axis one: a profile does not set its
    size.
    """
    small = _shallow(config)
    problems = [
        f"rung {name}: {line}"
        for name, count, parallel, zero in _scales(small, ranks)
        for line in rules.problems(_changed(small, count, parallel, zero), world_size=count, device=device)
    ]
    if problems:
        raise ValueError("\n".join(problems))
    scales = [
        _rung(config, name, count, _changed(small, count, parallel, zero))
        for name, count, parallel, zero in _scales(small, ranks)
    ]
    last = scales[-1]
    restarts = []
    for rung in scales:
        restarts.append(replace(rung, name=f"{rung.name}, restarted", resumes=rung.name))
        if rung is not last:
            restarts.append(replace(last, name=f"{rung.name}, restarted composed", resumes=rung.name))
    if small is config:
        return [*scales[:-1], replace(last, timed=True), *restarts]
    whole = replace(_rung(config, WHOLE, ranks, composed(config, ranks)), baseline=WHOLE, timed=True)
    return [*scales, whole, *restarts, replace(whole, name=f"{WHOLE}, restarted", resumes=WHOLE, timed=False)]


def _shallow(config: Config) -> Config:
    """With promote.layers blocks, cut anew; the config itself where that says nothing."""
    layers = config.promote.layers
    if layers is None or layers == config.model.num_layers:
        return config
    model, parallel = replace(config.model, num_layers=layers), replace(config.parallel, stages=None)
    return replace(config, model=model, parallel=parallel)


Scale = tuple[str, int, ParallelConfig, int]  # name, ranks, split, ZeRO stage


def _scales(config: Config, ranks: int) -> Iterator[Scale]:
    """One dimension after the other; those that the profile does not use are left out."""
    profile, alone = config.parallel, ParallelConfig(name=f"{config.parallel.name}_rung")
    dp = max(2, ranks // (profile.tp * profile.pp))
    least = _least_zero(config)
    yield BASELINE, 1, alone, least
    if profile.tp > 1:
        yield "tp alone", profile.tp, replace(alone, tp=profile.tp), least
    if profile.pp > 1:
        pipeline = replace(alone, pp=profile.pp, schedule=profile.schedule, stages=profile.stages)
        yield "pp alone", profile.pp, pipeline, least
    yield f"dp alone with ZeRO {config.zero.stage}", dp, alone, config.zero.stage
    if profile.sequence_parallel and profile.tp > 1:
        yield "sequence parallel", profile.tp, replace(alone, tp=profile.tp, sequence_parallel=True), least
    yield COMPOSED, ranks, profile, config.zero.stage


def _least_zero(config: Config) -> int:
    """No ZeRO where the precision can do without (`parallel.rules`), else stage 1."""
    precision = config.precision
    return 0 if precision.dtype is precision.grad_accum_dtype and precision.dtype.value != "fp16" else 1


def composed(config: Config, ranks: int) -> Config:
    """The config as the whole plan runs on so many ranks: of another cluster's nodes only as many as it needs."""
    return _changed(config, ranks, config.parallel, config.zero.stage)


def _changed(config: Config, ranks: int, parallel: ParallelConfig, zero: int) -> Config:
    cluster, per_node = config.cluster, config.cluster.devices_per_node
    if per_node is not None and cluster.nodes * per_node != ranks:
        nodes = -(-ranks // per_node)
        cluster = replace(cluster, nodes=nodes, devices_per_node=-(-ranks // nodes))
    offload = config.zero.offload_optimizer and zero == config.zero.stage
    chosen = replace(config.zero, stage=zero, offload_optimizer=offload)
    return replace(config, parallel=parallel, zero=chosen, cluster=cluster)


def _rung(config: Config, name: str, ranks: int, changed: Config) -> Rung:
    lines = [
        f"{group}.{key}={_typed(value)}"
        for group in ("model", "parallel", "zero", "cluster")
        for key, value in _differences(getattr(config, group), getattr(changed, group))
    ]
    return Rung(name, ranks, tuple(lines))


def _differences(before: Any, after: Any) -> list[tuple[str, Any]]:
    ours, theirs = plain(after), plain(before)
    return [(field.name, ours[field.name]) for field in fields(after) if ours[field.name] != theirs[field.name]]


def _typed(value: Any) -> str:
    """As Hydra's grammar takes it, without quotes or spaces."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
