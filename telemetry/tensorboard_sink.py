"""TensorBoard's event files on rank 0, where asked (`telemetry.tensorboard`): every sink's names, over steps.

Written with the tensorboard package itself, which needs no torch, and without its writer's thread, so that a full disk
is noticed here. Each start of a run writes a file of its own; where a step comes again, after a restart or a rollback,
a session mark lets TensorBoard forget the earlier values, as the later row counts.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

from telemetry.report import EvaluationReport, StepReport, as_metrics


class TensorBoardSink:
    """tensorboard --logdir RUN/tensorboard, or a folder of many runs, shows it."""

    def __init__(self, folder: Path):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.Event, self.SessionLog, self.Summary = Event, SessionLog, Summary
        folder.mkdir(exist_ok=True)
        number = len(list(folder.iterdir()))  # TensorBoard reads them in the order of their names
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{number}"
        self.file = (folder / name).open("wb", buffering=0)
        self.records = RecordWriter(self.file)
        self.last_step: int | None = None
        self._add(file_version="brain.Event:2")

    def write(self, report: StepReport | EvaluationReport) -> None:
        if self.last_step is None or report.step < self.last_step:
            self._add(step=report.step, session_log=self.SessionLog(status=self.SessionLog.START))
        self.last_step = report.step
        values = [
            self.Summary.Value(tag=name, simple_value=value)
            for name, value in as_metrics(report).items()
            if name != "step"
        ]
        self._add(step=report.step, summary=self.Summary(value=values))

    def write_image(self, name: str, path: Path) -> None:
        data = path.read_bytes()
        width, height = struct.unpack(">II", data[16:24])  # a PNG's header
        image = self.Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=data)
        value = self.Summary.Value(tag=name, image=image)
        self._add(step=self.last_step or 0, summary=self.Summary(value=[value]))

    def close(self, *, failed: bool, summary: dict[str, Any]) -> None:
        self.file.close()

    def _add(self, **content: Any) -> None:
        self.records.write(self.Event(wall_time=time.time(), **content).SerializeToString())


def open_tensorboard(folder: Path) -> TensorBoardSink | None:
    """None, after one warning, where it cannot start."""
    try:
        return TensorBoardSink(folder)
    except (ImportError, OSError) as error:
        print(f"warning: TensorBoard's files are not written ({error}); metrics.jsonl has everything", file=sys.stderr)
        return None
