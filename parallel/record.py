"""What a profile's record says of a plan: the conditions it holds for, and the prediction, as JSON has them.

`config_of` is the way back: a Config that the record's prediction can be made of again. Not here: the record as a file
and the profile it belongs to (`parallel.profile`).
"""

from __future__ import annotations

import json
import platform
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from conf.schema import ClusterConfig, Config, ModelConfig, ParallelConfig, PrecisionConfig, ZeroConfig
from parallel.collective import Collective
from parallel.communication import ledger
from parallel.ledger import Ledger
from parallel.memory import predict
from parallel.objectives import objective_of
from parallel.plan import ParallelPlan
from parallel.prediction import Prediction


def plain(value: Any) -> Any:
    """A dataclass as JSON has it."""
    return json.loads(json.dumps(asdict(value)))


def software() -> dict[str, str]:
    """Versions that decide what a plan costs here; a package that is not installed is left out."""
    found = {"python": platform.python_version()}
    for package in ("torch", "deepspeed"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def conditions(config: Config, *, world_size: int) -> dict[str, Any]:
    """What a prediction or an observation holds for, beside device and software: model, cluster, batch, formats."""
    cluster = config.cluster
    return {
        "model": plain(config.model),
        "cluster": {
            "name": cluster.name, "nodes": cluster.nodes, "devices_per_node": cluster.devices_per_node,
            "memory_per_device": cluster.memory_per_device, "ranks": world_size,
        },
        "batch": {
            "micro_batch_size": config.train.micro_batch_size, "global_batch_size": config.train.global_batch_size,
            "sequence_length": config.data.sequence_length, "mask_documents": config.data.mask_documents,
        },
        "precision": {
            "dtype": config.precision.dtype.value, "grad_accum_dtype": config.precision.grad_accum_dtype.value
        },
        "zero": plain(config.zero),
    }  # fmt: skip


def memory_ledgers(ledgers: Sequence[Ledger]) -> list[dict[str, Any]]:
    """Bytes of each pipeline rank, by category and in total."""
    return [
        plain(one)
        | {
            "kinds": one.kinds._asdict(),
            "states": one.states,
            "activations": round(one.activations - one.kinds.context),
        }
        | {"tensors": round(one.tensors), "total": round(one.total)}
        for one in ledgers
    ]


def communication(config: Config, plan: ParallelPlan, whole: Prediction | None) -> list[dict[str, dict[str, Any]]]:
    """Of each pipeline rank and step, by axis: bytes, calls and, where links are known, seconds, hidden or not."""
    priced: list[list[tuple[Collective, float | None]]]
    if whole is None:
        priced = [
            [(one, None) for one in ledger(config, plan, pp_rank)]
            for pp_rank in range(plan.pipeline_model_parallel_size)
        ]
    else:
        priced = [[(one.collective, one.seconds) for one in calls] for calls in whole.collectives]
    return [_by_axis(calls) for calls in priced]


def _by_axis(priced: Sequence[tuple[Collective, float | None]]) -> dict[str, dict[str, Any]]:
    axes: dict[str, dict[str, Any]] = {}
    for collective, seconds in priced:
        axis = axes.setdefault(collective.axis, {"bytes": 0, "calls": 0, "seconds": None})
        axis["bytes"] += collective.total_bytes
        axis["calls"] += collective.calls
        if seconds is not None:
            axis["seconds"] = (axis["seconds"] or 0.0) + seconds
    return axes


def predicted(config: Config, plan: ParallelPlan, prediction: Prediction | None, *, device: str) -> dict[str, Any]:
    """What a record keeps of a prediction; without one (a cluster that nobody measured) bytes alone."""
    ledgers = predict(config, plan, device=device) if prediction is None else prediction.ledgers
    found: dict[str, Any] = {
        "device": device,
        "memory": memory_ledgers(ledgers),
        "communication": communication(config, plan, prediction),
    }
    names = ("step_s", "bubble", "imbalance", "tokens_per_s", "tokens_per_s_per_device", "mfu", "hfu", "seconds")
    times = {name: None if prediction is None else getattr(prediction, name) for name in names}
    return found | {name: list(value) if isinstance(value, tuple) else value for name, value in times.items()}


def config_of(record: Mapping[str, Any]) -> Config:
    """What the record's prediction was made of: everything else in it is the schema's default."""
    conditions = record["conditions"]
    config = Config(
        model=built(ModelConfig, conditions["model"]),
        parallel=built(ParallelConfig, record["parallel"]),
        zero=built(ZeroConfig, conditions["zero"]),
        precision=built(PrecisionConfig, conditions["precision"]),
        cluster=built(ClusterConfig, record["cluster"]),
    )
    config.objective = objective_of(config.model.family)
    batch = conditions["batch"]
    config.train.micro_batch_size, config.train.global_batch_size = (
        batch["micro_batch_size"],
        batch["global_batch_size"],
    )
    config.data.sequence_length, config.data.mask_documents = batch["sequence_length"], batch["mask_documents"]
    return config


def built(kind: Any, values: Mapping[str, Any]) -> Any:
    """The dataclass from what `plain` made of it; a field that is not there keeps its default."""
    hints = typing.get_type_hints(kind)
    given = {}
    for field in fields(kind):
        if field.name not in values:
            continue
        value, hint = values[field.name], hints[field.name]
        if is_dataclass(hint):
            value = built(hint, value)
        elif isinstance(hint, type) and issubclass(hint, Enum):
            value = hint(value)
        given[field.name] = value
    return kind(**given)
