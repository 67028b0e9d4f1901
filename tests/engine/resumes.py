"""Saving and going on, on forked ranks: what the checkpoint tests share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from conf.schema import Config
from engine.checkpoints import Checkpoints, Progress, SaveReport
from engine.device import this_device
from engine.step import StepResult
from tests.engine.on_ranks import one_step, open_trainer


def open_checkpoints(config: Config, folder: Path) -> tuple[Checkpoints, tuple[Any, ...]]:
    """(checkpoints of a run in `folder`, what `one_step` takes) on this rank."""
    torch.set_num_threads(1)
    trainer, plan, groups, streams = open_trainer(config)
    session: Any = SimpleNamespace(
        config=config,
        plan=plan,
        groups=groups,
        folder=folder,
        run_id=folder.name,
        rank=dist.get_rank(),
        device=this_device(),
    )
    return Checkpoints(session, trainer, corpus_fingerprint="none"), (trainer, plan, groups, streams)


def train_and_save(config: Config, folder: Path, steps: int, *, first: int = 1, at: int | None = None) -> Any:
    """(results of `steps` steps, save reports); a checkpoint after step `at` (None: the last)."""
    checkpoints, parts = open_checkpoints(config, folder)
    results, reports = [], []
    for step in range(first, first + steps):
        results.append(one_step(*parts, config, step))
        if step == (at or first + steps - 1):
            reports += checkpoints.save(progress_at(config, step))
    return results, reports + checkpoints.finish()


def go_on(config: Config, folder: Path, steps: int) -> list[StepResult]:
    """Results of `steps` steps after the newest checkpoint."""
    checkpoints, parts = open_checkpoints(config, folder)
    progress = checkpoints.load_newest(checkpoints.newest_first(), only=False)
    return [one_step(*parts, config, progress.step + number) for number in range(1, steps + 1)]


def resume_train_save(config: Config, folder: Path, steps: int) -> list[StepResult]:
    """The same, and a checkpoint at the end; from scratch where there is none."""
    checkpoints, parts = open_checkpoints(config, folder)
    candidates = checkpoints.newest_first()
    start = checkpoints.load_newest(candidates, only=False).step if candidates else 0
    results = [one_step(*parts, config, start + number) for number in range(1, steps + 1)]
    reports: list[SaveReport] = checkpoints.save(progress_at(config, start + steps), wait=True)
    assert all(report.error is None for report in reports), reports
    return results


def progress_at(config: Config, step: int) -> Progress:
    samples = step * config.train.global_batch_size
    return Progress(step, samples, samples * config.data.sequence_length)
