"""A finished, failed or running run, read from what it left behind: its folder, or wandb's offline files.

Everything that compares works on `Run`; nothing here changes a file. A folder of an older version, or one that a
killed run left half written, is read as far as it goes, and `notes` says what could not be.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from telemetry.compare.attempts import placed
from telemetry.compare.files import config_of, identity_of, json_lines, json_object, numbers, plan_of
from telemetry.compare.wandb_runs import is_wandb, wandb_parts

Row = dict[str, Any]
WORDS = ("run.json", "config.json", "metrics.jsonl", "timeline.jsonl")
ENDINGS = {"complete.json": "complete", "failed.json": "failed"}


class RunError(ValueError):
    """A path that is no run, in one line."""


@dataclass(frozen=True)
class Start:
    """One start of a run, also one that resumed it: what ran from after `step` on. patch: uncommitted changes."""

    number: int
    step: int
    identity: Mapping[str, Any]
    config: Mapping[str, Any]
    plan: Mapping[str, Any]
    deepspeed: Mapping[str, Any]
    patch: str | None = None


@dataclass(frozen=True)
class Run:
    """name: short, the run's id; steps, evaluations: by step, of a step that was trained twice the later; events: the
    timeline; ending: complete, failed, interrupted, running or not ended."""

    name: str
    folder: Path
    starts: Sequence[Start]
    steps: Mapping[int, Row]
    evaluations: Mapping[int, Row]
    events: Sequence[Row] = ()
    prediction: Mapping[str, Any] | None = None
    ending: str = "not ended"
    error: str | None = None
    notes: Sequence[str] = ()

    @property
    def last(self) -> Start:
        """The start in force at the end."""
        return self.starts[-1]

    def start_at(self, step: int) -> Start:
        """The start that trained a step, as it counts."""
        return next((start for start in reversed(self.starts) if start.step < step), self.starts[0])

    @cached_property
    def ranks(self) -> dict[int, Row]:
        """The rows of ranks.jsonl by step; read when they are asked for, as they are many."""
        rows = json_lines(self.folder / "ranks.jsonl", [])
        whole = [row for row in rows if isinstance(row.get("step"), int) and isinstance(row.get("ranks"), list)]
        return {row["step"]: row for row in whole if row["step"] in self.steps}

    @property
    def tokens_per_step(self) -> list[int]:
        """The different numbers of tokens that its steps had; more than one under a batch ramp-up."""
        tokens = [(step, row["tokens"]) for step, row in self.steps.items() if "tokens" in row]
        found = {after - before for (step, before), (following, after) in pairwise(tokens) if following == step + 1}
        if tokens and tokens[0][0] == 1:
            found.add(tokens[0][1])
        return sorted(found)


def same_batches(first: Run, second: Run) -> bool:
    """Whether both have seen as many tokens after each step that both have."""
    shared = first.steps.keys() & second.steps.keys()
    places = [(first.steps[step].get("tokens"), second.steps[step].get("tokens")) for step in shared]
    return all(one == other for one, other in places if None not in (one, other))


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """All of them, under names that tell them apart. Raises RunError."""
    runs = [load_run(path) for path in paths]
    names = [run.name for run in runs]
    folders = [f"{run.name} ({_short(run.folder)})" if names.count(run.name) > 1 else run.name for run in runs]
    return [
        replace(run, name=f"{name} ({folders[: place + 1].count(name)})" if folders.count(name) > 1 else name)
        for place, (run, name) in enumerate(zip(runs, folders, strict=True))
    ]


def _short(folder: Path) -> str:
    """Its last two names: a copy of a run has its id."""
    return "/".join(folder.resolve().parts[-2:])


def load_run(path: Path) -> Run:
    """The run in a folder. Raises RunError where there is none."""
    if not path.exists():
        raise RunError(f"{path} does not exist; name the folder of a run (runs/EXPERIMENT/ID) or wandb's offline-run-*")
    if is_wandb(path):
        return _wandb_run(path)
    if path.is_file():
        raise RunError(f"{path} is a file; name the folder of a run (runs/EXPERIMENT/ID) or wandb's offline-run-*")
    if not any((path / word).exists() for word in WORDS):
        inside = sorted({found.parent for word in WORDS for found in path.glob(f"*/{word}")})
        meant = f"; did you mean {inside[-1]}?" if inside else "; name runs/EXPERIMENT/ID"
        raise RunError(f"{path} is not a run: it has none of {', '.join(WORDS)}{meant}")
    return _folder_run(path)


def _folder_run(folder: Path) -> Run:
    notes: list[str] = []
    rows, events = json_lines(folder / "metrics.jsonl", notes), placed(json_lines(folder / "timeline.jsonl", notes))
    steps, evaluations = counted(numbers(rows, notes))
    if not steps:
        notes.append("no step was recorded")
    starts = _starts(folder, events, notes)
    ending, error = _ending(folder, events)
    return Run(
        name=str(starts[0].identity.get("id") or folder.resolve().name), folder=folder, starts=starts, steps=steps,
        evaluations=evaluations, events=events,
        prediction=json_object(folder / "prediction.json", notes), ending=ending, error=error, notes=notes,
    )  # fmt: skip


def _wandb_run(path: Path) -> Run:
    parts = wandb_parts(path)
    notes = [*parts.notes, "read from wandb's files, which hold no timeline and no ranks"]
    steps, evaluations = counted(numbers(parts.rows, notes))
    start = Start(1, 0, identity_of(parts.identity, notes), config_of(parts.config, notes), {}, {})
    return Run(
        name=parts.name, folder=path, starts=[start], steps=steps, evaluations=evaluations, ending=parts.ending,
        notes=notes if steps else [*notes, "no step was recorded"],
    )  # fmt: skip


def counted(rows: Sequence[Row]) -> tuple[dict[int, Row], dict[int, Row]]:
    """Rows of steps and of evaluations as they count: one that goes back behind later ones (a restart, a rollback)
    takes these away. Hours and FLOPs that a row lacks are summed up where the rows from step 1 on allow it."""
    steps: dict[int, Row] = {}
    evaluations: dict[int, Row] = {}
    for row in rows:
        step = row.get("step")
        if not isinstance(step, int):
            continue
        if "validation/loss" in row:
            evaluations[step] = row
        if "train/loss" in row:
            for kept in (steps, evaluations):
                for later in [one for one in reversed(kept) if one > step]:
                    del kept[later]
            steps.pop(step, None)
            steps[step] = row
    _sum_up(steps, "hours", lambda row: row["train/step_time_s"] / 3600)
    return steps, evaluations


def _sum_up(steps: dict[int, Row], axis: str, part: Any) -> None:
    total = 0.0
    for place, (step, row) in enumerate(steps.items(), start=1):
        if axis in row or step != place or "train/step_time_s" not in row:
            return
        total += part(row)
        steps[step] = row | {axis: total}


def _starts(folder: Path, events: Sequence[Row], notes: list[str]) -> list[Start]:
    """Of starts/N.json; without them (an older run) what run.json, config.json and plan.json say."""
    files = sorted((folder / "starts").glob("[0-9]*.json"), key=lambda path: int(path.stem))
    first_steps = dict(_first_steps(events))
    found = []
    for path in files:
        kept = json_object(path, notes)
        if kept is None:
            continue
        patch, number = path.with_suffix(".patch"), int(path.stem)
        identity, config = identity_of(kept.get("identity"), notes), config_of(kept.get("config"), notes)
        plan, deepspeed = plan_of(kept.get("plan"), notes), kept.get("deepspeed") or {}
        text = patch.read_text(errors="replace") if patch.exists() else None
        found.append(Start(number, first_steps.get(number, 0), identity, config, plan, deepspeed, text))
    if found:
        return found
    names = ("run.json", "config.json", "plan.json", "deepspeed.json")
    identity, config, plan, deepspeed = (json_object(folder / name, notes) or {} for name in names)
    again = [event for event in events if event.get("event") == "start"]
    identity |= again[-1] if len(again) > 1 else {}
    return [Start(1, 0, identity_of(identity, notes), config_of(config, notes), plan, deepspeed)]


def _first_steps(events: Sequence[Row]) -> Iterator[tuple[int, int]]:
    """(number of a start, the step after which it trained)."""
    number = 0
    for event in events:
        if event.get("event") == "start":
            number = event.get("start", number + 1)
            yield number, event["step"]


def _ending(folder: Path, events: Sequence[Row]) -> tuple[str, str | None]:
    """How it ended, and the error in one line."""
    for name, word in ENDINGS.items():
        if (folder / name).exists():
            kept = json_object(folder / name, []) or {}
            error = str(kept["error"]).strip().splitlines()[-1] if kept.get("error") else None
            return (error, None) if error in ("interrupted", "terminated") else (word, error)
    last = events[-1] if events else {}
    if last.get("event") == "stopped on request":
        return "stopped on request", None
    if last.get("event") == "end":
        return str(last.get("outcome", "ended")), last.get("error")
    return ("running" if _is_held(folder) else "not ended"), None


def _is_held(folder: Path) -> bool:
    """Whether the process that last held the folder lives, as far as this machine can tell. Taking the lock to find
    out would refuse it to the run for a moment."""
    lock = folder / "run.lock"
    words = lock.read_text().split() if lock.exists() else []
    if len(words) < 4 or words[3] != socket.gethostname() or not words[1].isdigit():
        return False
    return lives(int(words[1]))


def lives(process: int) -> bool:
    """A process of this machine, whoever's it is."""
    if Path("/proc").exists():
        return Path(f"/proc/{process}").exists()
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True
