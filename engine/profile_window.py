"""torch.profiler over the steps that `telemetry.profile` names: a Chrome trace of each chosen rank and window.

    traces/rank-0-steps-10-12.pt.trace.json.gz      opens in ui.perfetto.dev; the name is what TensorBoard's profile
                                                    plugin and HolisticTraceAnalysis look for

Every step stands in it as ProfilerStep#N, each of the engine's instructions as an annotation of its name. Profiled
steps are slower than others; outside a window nothing is profiled and no instruction annotated. A window that a
rollback or a stop cuts short leaves no trace. By default the first rank of each pipeline stage is profiled: stages
differ in what they do and wait for, the other ranks of a stage do the same on other shards. Overlap is counted in
the traces by `telemetry.trace_overlap`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from conf.profile_windows import Window
from engine import last_state
from engine.distributed import gather
from engine.session import Session
from engine.step import Trainer
from telemetry.trace_overlap import Overlap, Profiled, overlap_in


class ProfileWindow:
    """watch(trainer, step) around each step, end(step) after it: on all ranks alike."""

    def __init__(self, session: Session, windows: Sequence[Window], ranks: Sequence[int] | None) -> None:
        _, dp, tp = session.plan.coordinate(session.rank)
        self.session, self.windows = session, windows
        self.is_profiled = session.rank in ranks if ranks is not None else dp == tp == 0
        self._profiler: profile | None = None
        self._steps: list[int] = []

    @contextmanager
    def watch(self, trainer: Trainer, step: int) -> Iterator[None]:
        if self._profiler is not None and step != self._steps[-1] + 1:  # the run went back
            self._profiler.stop()
            self._profiler = None
        if not self.is_profiled or self._window(step) is None:
            yield
            return
        if self._profiler is None:
            self._profiler, self._steps = _profiler(self.session), []
            self._profiler.start()
        self._steps.append(step)
        trainer.clock.annotate = record_function
        try:
            with record_function(f"ProfilerStep#{step}"):
                yield
        finally:
            trainer.clock.annotate = nullcontext

    def _window(self, step: int) -> Window | None:
        return next((window for window in self.windows if window[0] <= step <= window[1]), None)

    def end(self, step: int) -> Profiled | None:
        """What the window left whose last step this was."""
        window = self._window(step)
        if window is None or step != window[1]:
            return None
        found = gather(self._written() if self.is_profiled else None, group=self.session.control)
        written = {rank: one for rank, one in enumerate(found) if one is not None}
        reasons = dict.fromkeys(overlap for _, overlap in written.values() if isinstance(overlap, str))
        return Profiled(
            first_step=self._steps[0] if self._steps else window[0],
            last_step=step,
            paths={rank: path for rank, (path, _) in written.items() if path is not None},
            overlaps={rank: overlap for rank, (_, overlap) in written.items() if isinstance(overlap, Overlap)},
            reasons=tuple(reasons),
        )

    def _written(self) -> tuple[str | None, Overlap | str]:
        """Path of this rank's trace, relative to the run's folder, and what is counted in it, or why not."""
        assert self._profiler is not None and self.session.folder is not None
        last_state.now("write the trace")
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        folder = self.session.folder / "traces"
        first, last = self._steps[0], self._steps[-1]
        steps = f"{first}-{last}" if first != last else str(first)
        path = folder / f"rank-{self.session.rank}-steps-{steps}.pt.trace.json.gz"
        try:
            folder.mkdir(exist_ok=True)
            _export(profiler, path)
            return str(path.relative_to(self.session.folder)), overlap_in(path, rank=self.session.rank)
        except OSError as error:  # a full disk ends no training
            return None, f"{path} cannot be written: {error.strerror or error}"


def _profiler(session: Session) -> profile:
    activities = [ProfilerActivity.CPU]
    if session.device.kind == "cuda":
        torch.cuda.synchronize()  # kernels of the step before are not this window's
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities)


def _export(profiler: profile, path: Path) -> None:
    """Through another name, so that a reader never finds half a trace."""
    partial = path.with_name(f".{path.name}")
    profiler.export_chrome_trace(str(partial))
    os.replace(partial, path)
