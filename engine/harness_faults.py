"""What is wrong with a harness task or its files, in words: metrics, splits, data files and YAML, by name.

lm-eval tells some of it by a bare KeyError or StopIteration, some only after the model has answered, some never. Not
here: the rows of a task (`engine.harness_documents`). lm_eval is imported late.
"""

from __future__ import annotations

import glob
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from conf.knobs import did_you_mean

SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")


def task_of(error: BaseException) -> Any:
    """The lm_eval task whose constructor raised, or None: the exception itself does not say which of a group's."""
    from lm_eval.api.task import ConfigurableTask

    owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((owner for owner in owners if isinstance(owner, ConfigurableTask) and owner.config is not None), None)


def task_fault(task: Any) -> str | None:
    """Why a task cannot serve, as far as it was built; None where nothing is wrong with it."""
    found = [*_metric_faults(task), *_data_faults(task)]
    return found[0] if found else None


def _metric_faults(task: Any) -> Iterator[str]:
    """Of `metric_list`. To lm_eval a metric is None where it knows none of that name or process_results computes it."""
    from lm_eval.api.registry import AGGREGATION_REGISTRY, get_metric_aggregation, metric_registry

    known = set(metric_registry.keys())
    for entry in task.config.metric_list or []:
        metric, aggregation = entry.get("metric"), entry.get("aggregation")
        if not isinstance(metric, str):
            continue
        by_task = task.config.process_results is not None
        if not by_task and metric in task._metric_fn_list and task._metric_fn_list[metric] is None:
            near = did_you_mean(metric, known) or f"; known are {', '.join(sorted(known))}"
            yield f"metric {metric} is known neither to lm-eval nor to the package evaluate here{near}"
        elif "aggregation" not in entry and get_metric_aggregation(metric) is None:
            yield f"metric {metric} has no aggregation, and lm-eval none for it; add one, such as aggregation: mean"
        elif isinstance(aggregation, str) and aggregation not in AGGREGATION_REGISTRY:
            near = did_you_mean(aggregation, AGGREGATION_REGISTRY)
            names = near or f"; known are {', '.join(sorted(AGGREGATION_REGISTRY))}"
            yield f"metric {metric} has aggregation {aggregation}, which lm-eval does not know{names}"


def _data_faults(task: Any) -> Iterator[str]:
    dataset = getattr(task, "dataset", None)
    if dataset is None:
        for path in _files((task.config.dataset_kwargs or {}).get("data_files")):
            with path.open("rb") as file:
                if not file.read(4096).strip():
                    yield f"its data file {path} is empty"
        return
    for key in SPLITS:
        split = task.get_config(key)
        if split is None:
            continue
        if split not in dataset:
            yield f"{key} {split} is none of its data's; they have {', '.join(map(str, dataset))}"
        elif len(dataset[split]) == 0:
            yield f"{key} {split} has no rows"


def _files(said: Any) -> Iterator[Path]:
    """Local files of dataset_kwargs.data_files: a path, some, or a dict of them by split; globs too."""
    if isinstance(said, dict | list | tuple):
        for one in said.values() if isinstance(said, dict) else said:
            yield from _files(one)
    elif isinstance(said, str):
        yield from (path for path in map(Path, sorted(glob.glob(said))) if path.is_file())


def unreadable(paths: Iterable[Path]) -> str | None:
    """The first task file that is not YAML, or includes what is not there, with line and reason."""
    from lm_eval.tasks._yaml_loader import load_yaml

    for path in paths:
        try:
            load_yaml(path, resolve_func=False)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark is not None else "?"
            return f"{path} cannot be read (line {line}: {error.problem})"
        except (yaml.YAMLError, ValueError, OSError) as error:
            return f"{path} cannot be read ({(str(error).splitlines() or [type(error).__name__])[0]})"
    return None
