"""Which run and which checkpoint a command goes on from: decided on rank 0 before torch.distributed starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from conf.huggingface_config import FREE
from conf.load import OF_RECIPES, leaves, to_plain
from conf.schema import Config
from engine.checkpoint_folder import (
    ADAPTER_CONFIG,
    WEIGHTS,
    DamagedError,
    list_checkpoints,
    read_manifest,
    remove_leftovers,
    step_of,
)
from engine.checkpoints import Checkpoints, Progress
from engine.distributed import broadcast
from engine.failure import StopRun
from engine.initial_weights import adapter_folder, load_adapter, load_weights
from engine.session import announce
from engine.weight_folders import require_model
from parallel.adapters import checkpoint_bytes
from telemetry.redact import redacted
from telemetry.run_folder import (
    InUseError,
    claim_run_folder,
    lock_run_folder,
    restart_record,
    run_folder_path,
    write_json,
)
from telemetry.tables import size
from telemetry.timeline import Timeline

FREE_OF_LORA = ("dropout", "initialize_from")
ORIGIN = "origin.json"  # in the folder of a run that was started from another's checkpoint
ASIDE = ("model", "run", "telemetry", "alerts", *OF_RECIPES, "checkpoint", "resume", "initialize_from")


@dataclass(frozen=True)
class Start:
    """path: the run's folder, held by `lock` (rank 0 only); candidates: checkpoints to try, newest first; only: no
    other than the first.

    complete: the run has trained all its steps already. changed: knobs that differ from the first candidate's,
    (key, its value, the value in force). note: one line for the console.
    """

    path: Path | None = None
    lock: IO[str] | None = None
    candidates: list[Path] = field(default_factory=list)
    only: bool = False
    complete: bool = False
    changed: list[tuple[str, Any, Any]] = field(default_factory=list)
    note: str = ""

    def shared(self) -> Start:
        """Rank 0's choice on every rank; the lock stays with the original, which must live as long as the run."""
        return broadcast(replace(self, lock=None))


def choose_start(config: Config, *, rank: int) -> Start:
    """Claim the run's folder and list what to go on from. ValueError where that cannot be, with the remedy."""
    if rank != 0:
        return Start()
    _check_weights(config)
    adapter_folder(config)
    _require_room(config)
    if config.resume == "never":
        return _fresh(config)
    if config.resume == "auto":
        return _newest(config)
    return _at(config, Path(config.resume).expanduser().resolve())


def _require_room(config: Config) -> None:
    """ValueError where the disk that runs are kept on has no room for one checkpoint."""
    need = checkpoint_bytes(config)
    folder = run_folder_path(config.run, "id")
    folder = next(parent for parent in folder.parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    if config.checkpoint.interval > 0 and free < need:
        raise ValueError(
            f"{folder} has {size(free)} free but one checkpoint takes {size(need)}; make room, choose another "
            "run.dir, or train without checkpoints (checkpoint.interval=0)"
        )


def _fresh(config: Config, *, candidates: Sequence[Path] = (), note: str = "", **named: Any) -> Start:
    """A new run."""
    claimed = claim_run_folder(config.run)
    return Start(claimed.path, claimed.lock, list(candidates), note=note, **named)


def weights_folder(config: Config) -> Path | None:
    """The folder of safetensors that `initialize_from` means."""
    if config.initialize_from is None:
        return None
    given = Path(config.initialize_from).expanduser().absolute()
    return given / WEIGHTS if (given / WEIGHTS).is_dir() else given


def _check_weights(config: Config) -> None:
    """ValueError where the weights that `initialize_from` means are not there, torn, or another model's."""
    folder = weights_folder(config)
    if folder is None:
        return
    if (folder / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"initialize_from={config.initialize_from} holds adapters, no whole weights; merge them into their base "
            "first (recipes/convert.py merge), or set lora.initialize_from and name the base here"
        )
    require_model(folder, config.model, said=f"initialize_from={config.initialize_from}")


def _newest(config: Config) -> Start:
    """The run that run.id names, else the one of the experiment that is unfinished, unused, of this model, not beyond
    train.train_iters, and has the newest checkpoint.
    """
    run = config.run
    if run.id is not None:
        folder = run_folder_path(run, run.id)
        if not folder.is_dir():
            return _fresh(config)
        return _reopened(config, folder, _newest_first(folder) or _origin(folder))
    found = [_newest_first(folder.parent) for folder in run_folder_path(run, ".").glob("*/checkpoints")]
    for candidates in sorted(filter(None, found), key=lambda paths: paths[0].stat().st_mtime, reverse=True):
        folder = candidates[0].parents[1]
        fits = step_of(candidates[0]) <= config.train.train_iters and _is_same_kind(config, candidates)
        if fits and not (folder / "complete.json").exists():
            with suppress(InUseError):
                return _reopened(config, folder, candidates)
    note = f"resume=auto: no unfinished run of experiment {run.experiment} with this model; starting a new one"
    return _fresh(config, note=note)


def _at(config: Config, path: Path) -> Start:
    """A checkpoint that the user named, or the newest of a run: in its own run where run.id says so, or a new one."""
    candidates = _named(path)
    only = candidates == [path]
    if not candidates:
        raise ValueError(
            f"resume={config.resume}: there is no complete checkpoint; name a folder step-N or a run's folder"
            + (f" (weights alone: initialize_from={config.resume})" if (path / WEIGHTS).is_dir() else "")
        )
    own = None if config.run.id is None else run_folder_path(config.run, config.run.id)
    if own is not None and candidates[0].parents[1] == own.resolve():
        return _reopened(config, own, candidates, only=only)
    changed = _checked(config, candidates)
    _require_steps(config, candidates)
    start = _fresh(config, candidates=candidates, only=only, changed=changed)
    assert start.path is not None
    write_json(start.path / ORIGIN, {"resume": str(path)})
    return start


def _origin(folder: Path) -> list[Path]:
    """Where a run that has no checkpoint of its own yet was started from."""
    if not (folder / ORIGIN).exists():
        return []
    return _named(Path(json.loads((folder / ORIGIN).read_text())["resume"]))


def _named(path: Path) -> list[Path]:
    """The checkpoints that a path means: one, or those of a run's folder or its checkpoints folder, newest first."""
    if path in [folder for _, folder in list_checkpoints(path.parent)]:
        return [path]
    return _newest_first(path) or _newest_first(path.parent, name=path.name)


def _reopened(config: Config, folder: Path, candidates: list[Path], *, only: bool = False) -> Start:
    changed = _checked(config, candidates)
    complete, iters = folder / "complete.json", config.train.train_iters
    if not complete.exists():
        _require_steps(config, candidates)
    opened = lock_run_folder(folder)
    remove_leftovers(folder / "checkpoints")
    trained = [step for step, _ in list_checkpoints(folder / "checkpoints")]
    if complete.exists() and trained and trained[-1] >= iters:
        return Start(opened.path, opened.lock, complete=True, note=f"run {folder.name} has trained its {iters} steps")
    complete.unlink(missing_ok=True)
    (folder / "failed.json").unlink(missing_ok=True)
    note = "" if candidates else f"run {folder.name} has no checkpoint yet: it starts at step 0"
    return Start(opened.path, opened.lock, candidates, only=only, changed=changed, note=note)


def _require_steps(config: Config, candidates: list[Path]) -> None:
    """ValueError where the run would end before the step that it goes on from."""
    if candidates and step_of(candidates[0]) > config.train.train_iters:
        raise ValueError(
            f"{candidates[0]} is beyond train.train_iters={config.train.train_iters}; raise that, or start another run "
            "(another run.id, or resume=never)"
        )


def _newest_first(folder: Path, *, name: str = "checkpoints") -> list[Path]:
    return [path for _, path in reversed(list_checkpoints(folder / name))]


def _checked(config: Config, candidates: list[Path]) -> list[tuple[str, Any, Any]]:
    """What differs in how the model is trained. ValueError, with the list, where the model itself differs."""
    differences = _differences(config, candidates)
    if differences:
        lines = "; ".join(f"{key} is {ours} here and {theirs} there" for key, theirs, ours in differences)
        raise ValueError(f"{candidates[0]} holds another model: {lines}; start a new run with resume=never")
    saved = _saved_config(candidates)
    if saved is None:
        return []
    theirs, ours = (
        {key: value for key, value in leaves(plain) if key.split(".")[0] not in ASIDE}
        for plain in (saved, redacted(to_plain(config)))
    )
    return [(key, theirs.get(key), ours.get(key)) for key in sorted(theirs | ours) if theirs.get(key) != ours.get(key)]


def _is_same_kind(config: Config, candidates: list[Path]) -> bool:
    """Whether a run of these checkpoints is what this command would have started: same model, same first weights."""
    saved = _saved_config(candidates)
    same_weights = saved is None or saved.get("initialize_from") == redacted(config.initialize_from)
    return same_weights and not _differences(config, candidates)


def _differences(config: Config, candidates: list[Path]) -> list[tuple[str, Any, Any]]:
    """(knob, checkpoint's value, value here) where they are not the same model."""
    saved = _saved_config(candidates)
    if saved is None:
        return []
    theirs, ours = saved["model"], to_plain(config.model)
    keys = [key for key in ours if key not in FREE and theirs.get(key) != ours[key]]
    found = [(f"model.{key}", theirs.get(key), ours[key]) for key in keys]
    theirs, ours = saved.get("lora", {"rank": 0}), to_plain(config.lora)
    if theirs["rank"] == ours["rank"] == 0:
        return found
    keys = [key for key in ours if key not in FREE_OF_LORA and theirs.get(key) != ours[key]]
    return found + [(f"lora.{key}", theirs.get(key), ours[key]) for key in keys]


def _saved_config(candidates: list[Path]) -> dict[str, Any] | None:
    """The config of the newest checkpoint whose manifest can be read; damaged ones are named when they are loaded."""
    for path in candidates:
        try:
            return read_manifest(path)["config"]
        except DamagedError:
            continue
    return None


def begin(start: Start, checkpoints: Checkpoints, timeline: Timeline) -> Progress:
    """Load what `start` says into the trainer, on all ranks alike, and say so; and why, where launch/ restarted it."""
    progress = _loaded(start, checkpoints, timeline)
    again = restart_record()
    if again is not None:
        message = f"restart {again['number']} of {again['of']}: {again['reason']}"
        timeline.add("restart", step=progress.step, message=message, **again)
    return progress


def _loaded(start: Start, checkpoints: Checkpoints, timeline: Timeline) -> Progress:
    if start.note:
        announce(start.note)
    weights = weights_folder(config := checkpoints.session.config)
    if weights is not None and (config.lora.rank > 0 or not start.candidates):
        _load(load_weights, checkpoints, weights, "initialize_from")
    adapter = adapter_folder(config)
    if adapter is not None and not start.candidates:
        _load(load_adapter, checkpoints, adapter, "lora.initialize_from")
    if start.candidates:
        progress = checkpoints.load_newest(start.candidates, only=start.only)
        for key, theirs, ours in start.changed:
            announce(f"{key} is {ours} from here on (in the checkpoint: {theirs})")
        message = f"resumed after {progress.samples} samples, {progress.tokens} tokens"
        if weights is not None and config.lora.rank > 0:
            message += f", beside the frozen weights of {weights}"
        plan, path = checkpoints.session.plan.label, checkpoints.loaded
        timeline.add(
            "resume", step=progress.step, message=message, checkpoint=path, plan=plan, changed=start.changed
        )  # fmt: skip
        return progress
    for knob, folder in (("initialize_from", weights), ("lora.initialize_from", adapter)):
        if folder is not None:
            message = f"{knob} from {folder}; optimizer and step counter start anew"
            timeline.add("weights", step=0, message=message)
    return Progress()


def _load(load: Callable[[Checkpoints, Path], None], checkpoints: Checkpoints, folder: Path, knob: str) -> None:
    try:
        load(checkpoints, folder)
    except ValueError as error:  # DamagedError too
        raise StopRun(f"{knob}: {error}") from None
