"""The results of recipes/evaluate.py on rank 0: lines on the console, one JSON file, wandb.

results.json    {"evaluated": identity, "weights": ..., "step": ..., "plan": ..., "evaluate": the knobs,
                 "results": {"loss": {NAME: numbers}, "wikitext": {FILE: ...}, "lambada": ..., "harness": lm-eval's}}
                a number that is not finite is null
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conf.load import to_plain
from conf.schema import Config, EvaluateTask
from engine.checkpoint_folder import MANIFEST, read_manifest
from engine.evaluations import Metrics
from engine.session import Session
from engine.weight_source import WeightSource
from parallel.plan import ParallelPlan
from telemetry.redact import redacted
from telemetry.run_folder import identity, write_json
from telemetry.wandb_sink import open_wandb

RESULTS = "results.json"


def title(session: Session, source: WeightSource) -> str:
    """Which weights, under which plan."""
    model, dtype = session.config.model.name, session.config.precision.dtype.value
    return f"{'weights':<10} {source.path}: {model}, {degrees(session.plan)}, {dtype}"


def degrees(plan: ParallelPlan) -> str:
    """What of a plan forward passes know."""
    return (
        f"tp={plan.tensor_model_parallel_size} x pp={plan.pipeline_model_parallel_size} x dp={plan.data_parallel_size}"
    )


def target(config: Config) -> Path | None:
    """Where evaluate.write puts the results. ValueError where it cannot be."""
    if config.evaluate.write is None:
        return None
    path = Path(config.evaluate.write).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ValueError(f"evaluate.write={config.evaluate.write}: {what}; name a .json file in one that is there")
    return path


def step_of(weights: Path) -> int | None:
    """The step of training that a checkpoint was saved at; None of other folders."""
    progress = read_manifest(weights).get("progress") if (weights / MANIFEST).is_file() else None
    return None if progress is None else progress["step"]


def flat(results: Mapping[str, Any]) -> Metrics:
    """loss/validation/perplexity, lambada/FILE/accuracy, harness/TASK/acc, ...: names for wandb."""
    found: Metrics = {}
    for task, of_task in results.items():
        rows = of_task["results"] if task == EvaluateTask.harness.value else of_task
        for name, numbers in rows.items():
            short = Path(name).name
            for key, value in numbers.items():
                if isinstance(value, (int, float)):
                    found[f"{task}/{short}/{key.removesuffix(',none')}"] = value
    return found


def record(session: Session, results: Mapping[str, Any], *, source: WeightSource, out: Path | None) -> Path:
    """Write the results and log them, on rank 0. Where they are."""
    config, folder, step = session.config, session.folder, step_of(source.path)
    assert folder is not None
    path = out or folder / RESULTS
    about = {
        "evaluated": identity(session.run_id, hosts=session.hosts, device=session.device.name),
        "weights": str(source.path),
        "step": step,
        "plan": degrees(session.plan),
        "dtype": config.precision.dtype.value,
        "evaluate": to_plain(config.evaluate),
        "results": storable(results),
    }
    write_json(path, about)
    sink = open_wandb(
        config.telemetry.wandb, run_id=session.run_id, folder=folder, experiment=config.run.experiment,
        default_name=f"{config.model.name}-evaluation", config=redacted(to_plain(config)),
        tags=[config.model.name, degrees(session.plan), config.precision.dtype.value],
    )  # fmt: skip
    if sink is not None:
        sink.write_scores(flat(results), step=step or 0)
        sink.close(failed=False, summary={"weights": str(source.path)})
    return path


def storable(value: Any) -> Any:
    """Nested results as JSON can say them: a number that is not finite is null."""
    if isinstance(value, Mapping):
        return {key: storable(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [storable(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
