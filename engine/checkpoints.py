"""Checkpoints that name no topology: when they are written, which one counts, and what is read back.

A checkpoint (engine/checkpoint_folder.py) is written under another name, flushed to disk and renamed. Memory: a
synchronous save needs two boxes beyond what the rank holds (engine/storage.py), an asynchronous one a host copy of the
rank's share too (12 bytes x parameters / ranks under ZeRO), kept from save to save.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from conf.huggingface_config import huggingface_config
from conf.load import fingerprint, to_plain
from conf.schema import CheckpointConfig, OnSaveError
from corpus.cache import sync_folder
from engine import last_state
from engine.checkpoint_folder import (
    ADAPTER_CONFIG,
    FORMAT,
    KINDS,
    WEIGHTS,
    DamagedError,
    checkpoint_path,
    list_checkpoints,
    partial_path,
    prune,
    set_aside,
    write_manifest,
)
from engine.distributed import broadcast
from engine.failure import StopRun
from engine.held import (
    HostCopy,
    PiecesPlanner,
    boxes_to_load,
    loss_scale_state,
    optimizer_steps,
    pieces_to_save,
    set_loss_scale_state,
    set_optimizer_steps,
)
from engine.initial_weights import initial_base, require_base
from engine.safetensors_files import INDEX
from engine.session import Session, announce
from engine.step import Trainer
from engine.storage import BoxWriter, Checksum, StoredTensors, head_digest
from engine.tied_copies import require_equal_copies
from model.adapters import peft_config, trained_tensors
from telemetry.redact import redacted
from telemetry.run_folder import git_commit, utc_now, write_json

RANDOM_STATE_RULE = "reseeded each step from (seed, step, data rank, stage): nothing to store"


@dataclass(frozen=True)
class Progress:
    """Where a run stands between two steps: with weights and optimizer states, all that the next step depends on.

    step, samples, tokens, seconds: trained so far; skipped: steps that updated nothing; passed_over: [first, last)
    ranges of sample indices that are left out.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    passed_over: tuple[tuple[int, int], ...] = ()
    seconds: float = 0.0
    skipped: int = 0

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Progress:
        """Of a manifest: JSON knows no tuples."""
        return cls(**plain | {"passed_over": tuple((first, last) for first, last in plain["passed_over"])})


@dataclass(frozen=True)
class SaveReport:
    """A finished save: pause_s: how long training stood still; total_s: until it was on disk; error: why it is not.
    checksum: of the manifest, which holds those of all bytes; on rank 0.
    """

    step: int
    pause_s: float
    total_s: float
    bytes: int
    error: str | None = None
    checksum: str | None = None

    @property
    def words(self) -> str:
        return (
            f"checkpoint: {self.bytes / 1e6:,.1f} MB on this rank in {self.total_s:.2f} s, training paused "
            f"{self.pause_s:.2f} s"
        )


class Checkpoints:
    """The checkpoints of one run, on every rank alike.

    Of the saves in flight `poll` tells those that have ended on this rank; `finish` waits for them.
    """

    def __init__(self, session: Session, trainer: Trainer, *, corpus_fingerprint: str) -> None:
        assert session.folder is not None
        self.session, self.trainer, self.corpus_fingerprint = session, trainer, corpus_fingerprint
        self.settings: CheckpointConfig = session.config.checkpoint
        self.folder = session.folder / "checkpoints"
        config = session.config
        self.places = trained_tensors(config.model, config.lora)
        self.base = initial_base(config)  # what adapters stand beside: named in a checkpoint, not held
        self.group = dist.new_group(backend="gloo")  # its own: an asynchronous save talks while training does
        self.stager = HostCopy(session.device)
        self.resumed_from: int | None = None
        self.loaded: Path | None = None  # the checkpoint that the run went on from last
        self.saved = 0, time.perf_counter()  # step of the newest checkpoint, or of the start, and since when
        self.must_stop = False  # a save failed, and that shall end the run
        self.last_failed = False  # the newest save that has ended
        self._checksums: dict[int, str] = {}  # of manifests, by step
        self._pending: tuple[Future[Any], SaveReport, float] | None = None

    def is_due(self, step: int) -> bool:
        last = step == self.session.config.train.train_iters
        return self.settings.interval > 0 and (last or step % self.settings.interval == 0)

    def save(self, progress: Progress, *, wait: bool = False) -> list[SaveReport]:
        """Save now; returns the saves that ended meanwhile. `wait`: return when it is on disk.

        Raises StopRun where the copies of a tied table differ.
        """
        reports = self.finish()
        last_state.now("save")
        start = time.perf_counter()
        require_equal_copies(self.trainer, self.session.groups)
        pieces = pieces_to_save(self.trainer, self.places, self.session.groups)
        size = sum(tensor.nbytes for one in pieces.values() for tensor in one.tensors.values())
        partial = partial_path(self.folder, progress.step)
        meta = self._meta(progress)
        writer = BoxWriter(partial, on_finish=lambda checksums: self._complete(partial, meta, checksums))
        options: dict[str, Any] = {
            "storage_writer": writer,
            "planner": PiecesPlanner(),
            "process_group": self.group,
        }
        if self.settings.asynchronous and not wait:
            future: Any = dcp.async_save(pieces, async_stager=self.stager, **options)
        else:
            future = Future()
            try:
                future.set_result(dcp.save(pieces, **options))
            except dcp.CheckpointException as error:  # on every rank: DCP tells all of any rank's failure
                future.set_exception(error)
        pause = time.perf_counter() - start
        self._pending = future, SaveReport(progress.step, pause, pause, size), start
        return reports + (self.finish() if wait or not self.settings.asynchronous else [])

    def poll(self) -> list[SaveReport]:
        """The save in flight, if it has ended on this rank."""
        return self.finish() if self._pending is not None and self._pending[0].done() else []

    def finish(self) -> list[SaveReport]:
        """Wait for the save in flight."""
        if self._pending is None:
            return []
        last_state.now("wait for the save in flight")
        (future, report, start), self._pending = self._pending, None
        error = future.exception()
        report = dataclasses.replace(report, total_s=time.perf_counter() - start)
        self.last_failed = error is not None
        if error is None:
            self.saved = report.step, time.perf_counter()
            return [dataclasses.replace(report, checksum=self._checksums.get(report.step))]
        if not isinstance(error, dcp.CheckpointException):
            raise error
        if self.session.rank == 0:
            shutil.rmtree(partial_path(self.folder, report.step), ignore_errors=True)
        self.must_stop |= self.settings.on_error is OnSaveError.stop
        return [dataclasses.replace(report, error=_reason(error))]

    def newest_first(self) -> list[Path]:
        return [path for _, path in reversed(list_checkpoints(self.folder))]

    def newest(self) -> Path | None:
        return next(iter(broadcast(self.newest_first())), None)

    def load_newest(self, candidates: Sequence[Path], *, only: bool) -> Progress:
        """Load the first of rank 0's `candidates` (newest first) that passes its checksums; each damaged one is named.

        Raises StopRun where none does, or the first does not and `only`.
        """
        candidates = broadcast(candidates)
        for path in candidates:
            try:
                progress = self.load(path)
            except DamagedError as error:
                if only:
                    raise StopRun(f"{error}; choose another checkpoint or resume=auto") from None
                announce(f"warning: {error}; trying the checkpoint before it")
                continue
            for aside in set_aside(self.folder, after=progress.step) if self.session.rank == 0 else ():
                announce(f"{aside.name}: set aside, the run goes on from step {progress.step}")
            return progress
        raise StopRun(f"no checkpoint under {candidates[0].parent} is whole; resume=never starts over")

    def load(self, path: Path) -> Progress:
        """Weights, moments and progress of a checkpoint that any plan wrote. Raises DamagedError, on every rank."""
        stored = StoredTensors(path)
        manifest = stored.checked(KINDS)
        if path.name != checkpoint_path(self.folder, manifest["progress"]["step"]).name:
            raise DamagedError(f"checkpoint {path} has another name than its step {manifest['progress']['step']}")
        require_base(path, manifest.get("base"), self.base)
        stored.load(boxes_to_load(self.trainer, self.places, self.session.groups))
        set_optimizer_steps(self.trainer, manifest["optimizer_steps"])
        set_loss_scale_state(self.trainer, manifest["loss_scale"])
        self.resumed_from = manifest["progress"]["step"]
        self.loaded = path
        self.saved = self.resumed_from, time.perf_counter()
        if manifest["corpus_fingerprint"] != self.corpus_fingerprint:
            announce("the corpus is not the checkpoint's: sample numbers go on, in other text")
        return Progress.from_plain(manifest["progress"])

    def _meta(self, progress: Progress) -> dict[str, Any]:
        config = self.session.config
        return {
            "format": FORMAT,
            "progress": dataclasses.asdict(progress),
            "optimizer_steps": optimizer_steps(self.trainer),
            "random_state": RANDOM_STATE_RULE,
            "learning_rate": "a function of config, step and tokens: nothing to store",
            "loss_scale": loss_scale_state(self.trainer),
            "base": self.base,
            "config": redacted(to_plain(config)),
            "config_fingerprint": fingerprint(config),
            "plan": dataclasses.asdict(self.session.plan),
            "git_commit": git_commit() if self.session.rank == 0 else None,
            "corpus_fingerprint": self.corpus_fingerprint,
            "run": self.session.run_id,
        }

    def _complete(self, partial: Path, meta: dict[str, Any], checksums: list[Checksum]) -> None:
        """On rank 0, when every rank's bytes are on disk: manifest, final name, pruning."""
        config = self.session.config
        if self.base is None:
            about, content = "config.json", huggingface_config(config.model)
        else:
            about = ADAPTER_CONFIG
            content = peft_config(config.model, config.lora, base=self.base["initialize_from"])
        write_json(partial / WEIGHTS / about, content)
        files = {one.file: (partial / one.file).stat().st_size for one in checksums}
        others = [f"{WEIGHTS}/{about}", *(f"{kind}/{INDEX}" for kind in KINDS)]
        manifest = meta | {
            "saved": utc_now(),
            "files": files,
            "heads": {file: head_digest(partial / file) for file in [*files, *others]},
            "checksums": [dataclasses.asdict(one) for one in checksums],
        }
        self._checksums = {meta["progress"]["step"]: write_manifest(partial, manifest)}
        sync_folder(partial)
        partial.rename(checkpoint_path(self.folder, meta["progress"]["step"]))
        sync_folder(self.folder)
        protected = [] if self.resumed_from is None else [self.resumed_from]
        prune(self.folder, keep_last=self.settings.keep_last, keep_every=self.settings.keep_every, protected=protected)


def _reason(error: dcp.CheckpointException) -> str:
    """The first failed rank's own error."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {cause!r}"
