"""Folders of runs that never ran, by the contract that training keeps: for tests of what reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conf.schema import Config

TOKENS_A_STEP = 2048
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def plain_config(**changes: Any) -> dict[str, Any]:
    """The schema's defaults as config.json has them; `changes` as group__field=value."""
    from conf.load import to_plain

    config = to_plain(Config())
    config["model"]["name"], config["train"]["train_iters"] = "tiny", 40
    for key, value in changes.items():
        *groups, field = key.split("__")
        place = config
        for group in groups:
            place = place[group]
        place[field] = value
    return config


def loss_at(step: int) -> float:
    """A curve that falls from 8.3 to about 5."""
    return 5.0 + 3.3 * math.exp(-step / 15)


def step_row(step: int, **changes: Any) -> dict[str, Any]:
    """A step's row with all that two stages gather; `changes` by name, _ for /: train__loss=3.0."""
    row = {
        "step": step, "tokens": TOKENS_A_STEP * step, "flops": 6e6 * TOKENS_A_STEP * step, "hours": 0.5 * step / 3600,
        "train/loss": loss_at(step), "train/learning_rate": 1e-3, "train/grad_norm": 1.0 + 1 / step,
        "train/skipped": False, "train/skipped_steps": 0, "train/samples": 8 * step, "train/step_time_s": 0.5,
        "train/data_time_s": 0.01, "train/data_share": 0.02, "train/tokens_per_s": TOKENS_A_STEP / 0.5,
        "train/tokens_per_s_per_device": TOKENS_A_STEP, "train/model_flops_per_s_per_device": 1e10,
        "train/mfu_of_measured_rate": 0.4, "train/peak_memory_bytes": 1_000_000_000,
    }  # fmt: skip
    if step % 10 == 0:
        row |= {
            "pipeline/bubble": 0.2, "pipeline/bubble/stage0": 0.15, "pipeline/bubble/stage1": 0.25,
            "pipeline/imbalance": 1.1, "memory/peak_bytes": 1_100_000_000, "memory/peak_bytes/stage0": 1_100_000_000,
            "communication/pipe/send/calls": 8, "communication/pipe/send/bytes": 1_000_000,
            "communication/pipe/send/seconds": 0.02, "communication/tensor/all_reduce/seconds": 0.05,
            "communication/exposed_share": 0.1, "ranks/slowdown": 1.05, "ranks/slowest": 1,
        }  # fmt: skip
    return row | {key.replace("__", "/"): value for key, value in changes.items()}


def write_run(
    folder: Path,
    *,
    rows: Sequence[Mapping[str, Any]] | None = None,
    config: Mapping[str, Any] | None = None,
    identity: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
    events: Sequence[Mapping[str, Any]] = (),
    patch: str | None = None,
    ending: str | None = "complete",
) -> Path:
    """A run of one start in `folder`, of 40 steps unless `rows` are given."""
    rows = [step_row(step) for step in range(1, 41)] if rows is None else rows
    config = plain_config() if config is None else config
    who = {
        "id": folder.name, "started": "2026-01-01T00:00:00Z", "command": "python recipes/pretrain.py",
        "config_fingerprint": "c", "corpus_fingerprint": "corpus-1", "tokenizer_fingerprint": "bytes", "seed": 1234,
        "hosts": ["a", "a"], "git_commit": COMMIT, "packages": {"torch": "2.13.0"}, "python": "3.11.7",
        "cluster": "local",
    } | dict(identity or {})  # fmt: skip
    planned = {
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2, "data_parallel_size": 1, "world_size": 2,
        "zero_stage": 1, "schedule": "1f1b", "recompute": "none", "sequence_parallel": False,
    } | dict(plan or {})  # fmt: skip
    (folder / "starts").mkdir(parents=True)
    start = {"identity": who | {"start": 1}, "config": config, "plan": planned, "deepspeed": {"train_batch_size": 8}}
    for name, value in {"run.json": who, "config.json": config, "plan.json": planned, "starts/1.json": start}.items():
        (folder / name).write_text(json.dumps(value))
    if patch is not None:
        (folder / "starts" / "1.patch").write_text(patch)
    write_lines(folder / "metrics.jsonl", rows)
    first = {"time": "2026-01-01T00:00:00Z", "event": "start", "step": 0, **who, "start": 1}
    write_lines(folder / "timeline.jsonl", [first, *events])
    if ending is not None:
        (folder / f"{ending}.json").write_text(json.dumps({"error": "boom"} if ending == "failed" else {}))
    return folder


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def event(step: int, name: str, *, second: int = 0, **details: Any) -> dict[str, Any]:
    """`second`: after the start of the run."""
    time = f"2026-01-01T00:{second // 60:02d}:{second % 60:02d}Z"
    return {"time": time, "event": name, "step": step, **details}


def bad_run(folder: Path, **named: object) -> Path:
    """Parts at step 23, where its samples make a spike that an alert saw; rank 1 of stage 0 computes slowly from 20."""
    rows = [step_row(step, train__loss=loss_at(step) * (1.5 if step >= 23 else 1)) for step in range(1, 41)]
    events = [
        event(20, "checkpoint", second=10, bytes=10**6, checksum="ab"),
        event(23, "bad step", second=12, what="spike", samples=[176, 184]),
        event(24, "alert raised", second=13, alert="loss_spike", slice="stage 1", mitigation="lower train.lr"),
        event(20, "rollback", second=14, bad_step=23), event(26, "alert cleared", second=20, alert="loss_spike"),
    ]  # fmt: skip
    write_run(folder, rows=rows, events=events, **named)
    ranks = [{"rank": rank, "host": "ab"[rank], "pp": 0, "compute_s": 1.0 + rank} for rank in range(2)]
    ranks.append({"rank": 2, "host": "a", "pp": 0, "compute_s": 1.0})
    write_lines(folder / "ranks.jsonl", [{"step": 30, "time": "2026-01-01T00:00:30Z", "ranks": ranks}])
    return folder
