"""What a run needs of one host: bytes of memory on each of its ranks and of disk for the checkpoints, predicted.

Not here: what the host has (check_host.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Any

from conf.cli import require_plan
from conf.schema import Config
from parallel import memory
from parallel.adapters import checkpoint_bytes
from parallel.plan import ParallelPlan
from telemetry.run_folder import run_folder_path


def needs(config: Config, ranks: Sequence[int], *, world_size: int, device: str) -> dict[str, Any]:
    """rank_bytes: of each of the host's ranks; host_bytes: of states that they offload. ConfigError without a plan."""
    require_plan(config, world_size=world_size, device=device)
    plan = ParallelPlan.from_config(config, world_size, device=device)
    ledgers = memory.predict(config, plan, device=device)
    mine = [ledgers[plan.coordinate(rank)[0]] for rank in ranks]
    return {
        "rank_bytes": [ledger.total for ledger in mine],
        "host_bytes": sum(ledger.host for ledger in mine),
        "checkpoint_bytes": checkpoint_bytes(config),
        "checkpoints": max(0, checkpoints(config) - held(config)),
    }


def checkpoints(config: Config) -> int:
    """How many lie on the disk at once at most: those kept, and the one that is being written."""
    chosen, steps = config.checkpoint, config.train.train_iters
    if chosen.interval == 0:
        return 1  # when the run is asked to stop
    saves = -(-steps // chosen.interval)
    if chosen.keep_last < 0:
        return saves
    for_good = steps // lcm(chosen.keep_every, chosen.interval) if chosen.keep_every else 0
    return min(saves, chosen.keep_last + 1 + for_good)


def held(config: Config) -> int:
    """Checkpoints that a run which is gone on with has on the disk already."""
    if config.resume != "auto":
        return 0
    experiment = run_folder_path(config.run, config.run.id or "any").parent
    runs = sorted(one for one in experiment.glob("*") if not (one / "complete.json").exists())
    runs = [experiment / config.run.id] if config.run.id else runs
    return len(list((runs[-1] / "checkpoints").glob("step-*"))) if runs else 0
