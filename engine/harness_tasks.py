"""Tasks of the lm-evaluation-harness, found and loaded on rank 0 before anything starts. lm_eval is imported late.

A task is a YAML file: named by its path, or by what it calls itself in `include_path` or in lm-eval's own folder. Its
data are local files (dataset_path: json, dataset_kwargs: {data_files: ...}; paths from the folder of the call), or a
dataset of the hub that this machine holds already: the recipe sets HF_HUB_OFFLINE=1 unless the environment has it.
"""

from __future__ import annotations

import importlib.util
import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conf.evaluate_schema import HarnessConfig
from conf.knobs import did_you_mean
from engine.harness_documents import Say, first_row_fault, require_rows
from engine.harness_faults import task_fault, task_of, unreadable

INSTALL = "pip install 'lm-eval>=0.4.9,<0.5'"


@dataclass(frozen=True)
class LoadedTasks:
    """lm_eval's Tasks and Groups as asked for, with their data, and the TaskManager that knows them."""

    asked: list[Any]
    manager: Any


def load_tasks(harness: HarnessConfig) -> LoadedTasks:
    """ValueError, a line, where lm-eval, a task or its data is missing."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(f"evaluate.harness.tasks needs the package lm-eval, which is not installed; {INSTALL}")
    if harness.include_path is not None and not Path(harness.include_path).is_dir():
        raise ValueError(f"evaluate.harness.include_path={harness.include_path}: no such folder (from {Path.cwd()})")
    with quiet(logging.CRITICAL):  # its errors become lines of ours
        manager = _manager(harness)
        _require_names(harness.tasks, manager, harness)
        asked = [one for name in harness.tasks for one in _load(name, manager)]
        try:
            manager.load(asked)
        except ValueError as error:  # a task that stands in two of them
            raise ValueError(f"evaluate.harness.tasks: {error}") from None
        return LoadedTasks(asked, manager)


def prepared(tasks: LoadedTasks, *, num_fewshot: int | None) -> Any:
    """What lm_eval's `evaluate` takes, examples and seeds as its simple_evaluate sets them."""
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

    loaded = tasks.manager.load(tasks.asked)
    for task in loaded["tasks"].values():
        task.set_config(key="num_fewshot", value=_shots(task, num_fewshot))
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    return loaded


def require_documents(tasks: LoadedTasks, *, num_fewshot: int | None, limit: int | None, say: Say) -> None:
    """ValueError, a line, where a task's rows cannot be asked about; `say`: see `require_rows`."""
    from lm_eval.api.task import ConfigurableTask

    with quiet():
        for task in tasks.manager.load(tasks.asked)["tasks"].values():
            if isinstance(task, ConfigurableTask):  # one written in Python has ways of its own
                try:
                    require_rows(task, shots=_shots(task, num_fewshot), limit=limit, say=say)
                except ValueError as error:
                    raise ValueError(f"evaluate.harness.tasks: {error}") from None


def _shots(task: Any, asked: int | None) -> Any:
    """Examples before each question: as asked for, but none where the task says 0."""
    said = task.get_config("num_fewshot")
    return (asked or 0) if said is None or (asked is not None and said != 0) else said


@contextmanager
def quiet(level: int = logging.ERROR) -> Iterator[None]:
    """lm_eval's notes of less than an error stay off the console: it repeats the config of each task."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def _manager(harness: HarnessConfig) -> Any:
    """One that knows the user's folder; lm-eval's own 14,000 tasks, which take 17 s to list, where a name asks."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=harness.include_path, include_defaults=False)
    if all(_is_file(name) or name in manager.all_tasks for name in harness.tasks):
        return manager
    return TaskManager(include_path=harness.include_path)


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or "/" in name


def _require_names(names: Sequence[str], manager: Any, harness: HarnessConfig) -> None:
    for name in names:
        if _is_file(name):
            if not Path(name).is_file():
                raise ValueError(f"evaluate.harness.tasks: {name}: no such file (from {Path.cwd()})")
            if (fault := unreadable([Path(name)])) is not None:
                raise ValueError(f"evaluate.harness.tasks: {fault}")
        elif name not in manager.all_tasks:
            searched = "lm-eval's own" if harness.include_path is None else f"{harness.include_path} and lm-eval's own"
            near = did_you_mean(name, manager.all_tasks)
            fault = unreadable(sorted(Path(harness.include_path).rglob("*.yaml"))) if harness.include_path else None
            helps = f"; {fault}" if fault is not None else near
            raise ValueError(f"evaluate.harness.tasks: no task, group or tag {name} in {searched}{helps}")


def _load(name: str, manager: Any) -> list[Any]:
    """Reads the data of its tasks too. lm_eval, datasets and the hub raise errors of many kinds for what they lack."""
    from lm_eval.api.task import ConfigurableTask

    try:
        found = manager.load([name])
    except Exception as error:
        built = task_of(error)
        if built is not None and (fault := task_fault(built)) is not None:
            raise ValueError(f"evaluate.harness.tasks: {built.task_name}: {fault}") from None
        if built is not None and (row := first_row_fault(built)) is not None:
            raise ValueError(f"evaluate.harness.tasks: {row}") from None
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        helps = ""
        if isinstance(error, ConnectionError) or "Hub" in reason:
            helps = (
                "; it wants a dataset of the hub, which is not on this machine: write a task file with dataset_path: "
                "json and dataset_kwargs.data_files, or set HF_HUB_OFFLINE=0 where the hub can be reached"
            )
        raise ValueError(
            f"evaluate.harness.tasks: {name} cannot be loaded ({type(error).__name__}: {reason}){helps}"
        ) from None
    for task in found["tasks"].values():
        if isinstance(task, ConfigurableTask) and (fault := task_fault(task)) is not None:
            raise ValueError(f"evaluate.harness.tasks: {task.task_name}: {fault}")
    below = {child for children in found["group_map"].values() for child in children}
    both = {**found["groups"], **found["tasks"]}
    return [one for known_as, one in both.items() if known_as not in below]
