"""Where reports go on rank 0: console, metrics.jsonl, wandb. A sink that fails says so once and stops nothing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from telemetry.report import EvaluationReport, StepReport, as_metrics
from telemetry.run_folder import utc_now

Report = StepReport | EvaluationReport
Rows = Callable[[Report], list[dict[str, Any]]]


class Sink(Protocol):
    def write(self, report: Report) -> None: ...
    def write_image(self, name: str, path: Path) -> None: ...
    def close(self, *, failed: bool, summary: dict[str, Any]) -> None: ...


@runtime_checkable
class CheckpointSink(Protocol):
    """A sink that tells where checkpoints are; about: step, bytes, checksum of the manifest."""

    def write_checkpoint(self, path: Path, about: Mapping[str, Any]) -> None: ...


@runtime_checkable
class Messenger(Protocol):
    """A sink that can tell somebody. It warns once by itself where that fails: its other work goes on."""

    def alert(self, title: str, text: str, level: str) -> None: ...


def rank_rows(report: Report) -> list[dict[str, Any]]:
    """For ranks.jsonl: a line a step in which all ranks told what they measured."""
    if not isinstance(report, StepReport) or report.ranks is None:
        return []
    return [{"step": report.step, "time": utc_now(), "ranks": [one.as_row() for one in report.ranks.ranks]}]


class JsonlSink:
    """metrics.jsonl, or another file: the rows of every report, one a line, flushed. A run that goes on appends: steps
    that a killed start trained beyond its last checkpoint come twice, and the later row counts.
    """

    def __init__(
        self, path: Path, rows: Callable[[Report], list[dict[str, Any]]] = lambda report: [as_metrics(report)]
    ):
        self.path, self.rows = path, rows
        torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.pending = b"\n" if torn else b""  # after a start that was killed while it wrote; what a full disk refused
        self.warned = False

    def write(self, report: Report) -> None:
        self.pending += "".join(json.dumps(row) + "\n" for row in self.rows(report)).encode()
        try:
            while self.pending:
                self.pending = self.pending[os.write(self.file, self.pending) :]
        except OSError as error:
            if not self.warned:
                kept = "rows are kept until it can"
                print(f"warning: {self.path} cannot be written, {kept}: {error.strerror}", file=sys.stderr, flush=True)
            self.warned = True

    def write_image(self, name: str, path: Path) -> None:
        """Images are files of their own."""

    def close(self, *, failed: bool, summary: dict[str, Any]) -> None:
        os.close(self.file)


class ConsoleSink:
    """One line every `interval` steps and for each evaluation."""

    def __init__(self, *, interval: int):
        self.interval = interval
        self.validation: float | None = None

    def write(self, report: Report) -> None:
        if isinstance(report, EvaluationReport):
            self.validation = report.loss
            print(f"step {report.step:>6}  validation loss {report.loss:.4f}", flush=True)
        elif report.skipped or report.step % self.interval == 0 or report.step in (1, report.train_iters):
            print(step_line(report), flush=True)

    def write_image(self, name: str, path: Path) -> None:
        """The closing table names the files."""

    def close(self, *, failed: bool, summary: dict[str, Any]) -> None:
        """The closing table is the recipe's."""


def step_line(report: StepReport) -> str:
    utilisation = report.mfu if report.mfu is not None else report.mfu_of_measured_rate
    parts = [
        f"step {report.step:>6}/{report.train_iters}",
        f"loss {report.loss:.4f}",
        f"lr {report.learning_rate:.2e}",
        f"norm {report.grad_norm:.3f}",
        f"{report.tokens_per_s:,.0f} tokens/s",
        f"MFU {utilisation:.0%}" if utilisation is not None else "",
        f"ETA {duration(report.eta_s)}",
        "SKIPPED: a gradient was not finite" if report.skipped else "",
    ]
    return "  ".join(part for part in parts if part)


def duration(seconds: float) -> str:
    """12s, 3m04s or 2h05m."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


class Sinks:
    """All sinks of a run, closed at the end of the `with` block and told whether it ended in an exception.

    The first failure of each is reported on stderr. A sink that cannot write reports is left out from then on; one that
    cannot take an image or a checkpoint goes on with the rest. `summary` is what the closing sinks store for the whole
    run.
    """

    def __init__(self, sinks: Sequence[Sink]):
        self.sinks = list(sinks)
        self.warned: set[tuple[str, str]] = set()
        self.summary: dict[str, Any] = {}

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._each("close", failed=error is not None, summary=self.summary)

    def write(self, report: Report) -> None:
        self._each("write", report)

    def write_image(self, name: str, path: Path) -> None:
        self._each("write_image", name, path, beside=True)

    def write_checkpoint(self, path: Path, about: Mapping[str, Any]) -> None:
        self._each("write_checkpoint", path, about, beside=True, kind=CheckpointSink)

    def alert(self, title: str, text: str, level: str) -> None:
        """To the sinks that can tell somebody; level: info, warning or error."""
        for sink in self.sinks:
            if isinstance(sink, Messenger):
                sink.alert(title, text, level)

    def _each(self, method: str, *arguments: Any, beside: bool = False, kind: type = object, **named: Any) -> None:
        """beside: the sink is kept where it fails."""
        for sink in [sink for sink in self.sinks if isinstance(sink, kind)]:
            try:
                getattr(sink, method)(*arguments, **named)
            except Exception as error:
                name, what = type(sink).__name__, "failed and is off from here on"
                if beside:
                    what = f"cannot {method.replace('_', ' ')}, and goes on without"
                else:
                    self.sinks.remove(sink)
                if (name, method) not in self.warned:
                    print(f"warning: {name} {what}: {error!r}", file=sys.stderr, flush=True)
                self.warned.add((name, method))
