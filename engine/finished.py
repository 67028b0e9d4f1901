"""What promote.run names, read to one form: the folder of a training run, or the JSON that recipes/benchmark.py writes.

A benchmark's contenders train on random tokens (`engine.measure.SkewedTokens`), not on a corpus, so that its losses are
comparable with those of its own one-device contender and with no run's. Not here: what an observation must show
(`parallel.promotion`), and the record (`engine.promote`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from conf.load import from_plain
from conf.schema import Config
from engine.ladder import read_run
from parallel.plan import ParallelPlan
from parallel.plan_name import plan_config
from parallel.profile import Profile, prediction_or_none
from parallel.record import conditions
from parallel.rungs import composed

OURS = "ours "  # before the name of a plan, of a contender that is not another package's program
TOKENS = "random tokens of engine.measure.SkewedTokens, no corpus"


@dataclass(frozen=True)
class Finished:
    """kind: run or benchmark; observed: what an observation keeps as it is; baseline: losses of one device, where they
    are known, and `baseline_name` whose they are."""

    kind: str
    observed: Mapping[str, Any]
    step_s: float
    predicted_step_s: float | None
    peak_bytes: Sequence[int]
    memory_limit: float | None
    losses: Mapping[int, float]
    baseline: Mapping[int, float] | None
    baseline_name: str | None


def finished(config: Config, plan: ParallelPlan) -> Finished:
    """Of the profile `config.parallel` on the plan's ranks. Raises ValueError where promote.run did not measure it."""
    path = Path(config.promote.run or "")
    return _benchmark(path, config, plan) if path.is_file() else _run(path, config)


def _run(folder: Path, config: Config) -> Finished:
    seen = read_run(folder)
    if seen.prediction is None or not (folder / "complete.json").exists():
        raise ValueError(f"promote.run={folder} has no prediction.json and complete.json: no run that finished")
    found, step, baseline = seen.prediction, seen.pair("step_s"), config.promote.baseline
    if found["profile"]["hash"] != Profile.of(config.parallel).hash:
        raise ValueError(f"promote.run={folder} ran profile {found['profile']['name']} with other knobs")
    return Finished(
        kind="run", observed={name: found[name] for name in ("device", "software", "conditions")}
        | {"measured": found, "folder": seen.folder},
        step_s=step["measured"], predicted_step_s=step["predicted"], peak_bytes=found["peak_bytes"],
        memory_limit=found["memory_limit"], losses=seen.losses,
        baseline=None if baseline is None else read_run(Path(baseline)).losses, baseline_name=baseline,
    )  # fmt: skip


def _benchmark(path: Path, config: Config, plan: ParallelPlan) -> Finished:
    if config.promote.baseline is not None:
        raise ValueError(
            f"promote.baseline={config.promote.baseline} trained on a corpus, and the contenders of promote.run={path} "
            "on random tokens; leave it out: they are compared with their own one-device contender"
        )
    kept = _read(path)
    asked = _as_profiled(kept, config, plan)
    its_plan = ParallelPlan.from_config(asked, plan.world_size, device=kept["device_kind"])
    name = _contender(path, kept, its_plan)
    measured, other = kept["steps"][name], _one_device(kept, besides=name)
    prediction = prediction_or_none(asked, its_plan, device=kept["device_kind"])
    return Finished(
        kind="benchmark", observed={name: kept[name] for name in ("device", "software")}
        | {"conditions": conditions(asked, world_size=plan.world_size), "tokens": TOKENS}
        | {"measured": measured | {"contender": name, "git_commit": kept["git_commit"]}, "file": str(path)},
        step_s=median(measured["step_times_s"]),
        predicted_step_s=None if prediction is None else prediction.step_s,
        peak_bytes=measured["peak_bytes"],
        memory_limit=asked.cluster.memory_per_device or measured["memory_limit"], losses=_losses(kept, name),
        baseline=None if other is None else _losses(kept, other), baseline_name=other,
    )  # fmt: skip


def _read(path: Path) -> dict[str, Any]:
    try:
        kept = json.loads(path.read_text())
    except ValueError:
        kept = None
    if not isinstance(kept, dict) or not {"contenders", "steps", "config"} <= kept.keys():
        raise ValueError(f"promote.run={path} is a file, but none that recipes/benchmark.py wrote")
    if "software" not in kept:
        raise ValueError(
            f"promote.run={path} is of an older recipes/benchmark.py, which kept neither software versions nor the "
            "memory of each rank; measure again"
        )
    return kept


def _as_profiled(kept: Mapping[str, Any], config: Config, plan: ParallelPlan) -> Config:
    """Model, batch, precision and cluster of the benchmark, split as the profile says, on as many ranks."""
    written = from_plain(kept["config"])
    zero = replace(written.zero, stage=config.zero.stage)
    return composed(replace(written, parallel=config.parallel, zero=zero), plan.world_size)


def _contender(path: Path, kept: Mapping[str, Any], asked: ParallelPlan) -> str:
    """Ours whose plan is the one asked for, however the profile and the contender's name spell it."""
    written, ours = from_plain(kept["config"]), [row for row in kept["contenders"] if row["name"].startswith(OURS)]
    for row in ours:
        split, _ = plan_config(row["name"].removeprefix(OURS), written)
        found = ParallelPlan.from_config(split, row["ranks"], device=kept["device_kind"])
        if replace(found, warnings=()) == replace(asked, warnings=()):
            return row["name"]
    measured = ", ".join(row["name"].removeprefix(OURS) for row in ours) or "no plan of ours"
    raise ValueError(
        f"promote.run={path} measured {measured}; none is this profile on {asked.world_size} ranks with ZeRO stage "
        f"{asked.zero_stage}: measure that, or name what was measured by promote.ranks and zero.stage"
    )


def _one_device(kept: Mapping[str, Any], *, besides: str) -> str | None:
    """Our plan on one rank; where that is not there, or the one that is judged, another package's program."""
    alone = [row["name"] for row in kept["contenders"] if row["ranks"] == 1 and row["name"] != besides]
    return min(alone, key=lambda name: not name.startswith(OURS), default=None)


def _losses(kept: Mapping[str, Any], name: str) -> dict[int, float]:
    return dict(enumerate(kept["steps"][name]["losses"], start=1))
