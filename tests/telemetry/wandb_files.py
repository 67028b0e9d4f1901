"""What tests ask of the .wandb files of a run's folder, through the reader of telemetry/wandb_files.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from telemetry.wandb_files import payloads, read_file, segments

__all__ = ["alerts", "exit_code", "read", "segments", "stored"]


def stored(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any], Any]:
    """History rows, config and run record of the one offline run under `folder`."""
    [path] = segments(folder)
    return read(path)


def read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any], Any]:
    """History rows, config and run record of one file."""
    file = read_file(path)
    return list(file.rows), file.config, file.run


def exit_code(folder: Path) -> int | None:
    """The code that the run finished with; None where it never finished."""
    [path] = segments(folder)
    return read_file(path).exit_code


def alerts(path: Path) -> list[tuple[str, str]]:
    """(title, level) of each alert in one file."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for payload in payloads(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(payload)
        if record.WhichOneof("record_type") == "alert":
            found.append((record.alert.title, record.alert.level))
    return found
