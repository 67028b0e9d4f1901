"""Reads a .wandb file: LevelDB's log framing (blocks of 32 KiB; records of checksum, length, type) around wandb's
own protobuf messages. wandb 0.31 ships no Python reader any more.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32768
RECORD_HEADER = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def payloads(path: Path) -> Iterator[bytes]:
    data = path.read_bytes()
    assert data[:4] == b":W&B", f"{path} is not a wandb file"
    place, parts = 7, []
    while place + RECORD_HEADER.size <= len(data):
        left = BLOCK - place % BLOCK
        if left < RECORD_HEADER.size:
            place += left
            continue
        _, length, kind = RECORD_HEADER.unpack_from(data, place)
        place += RECORD_HEADER.size
        parts.append(data[place : place + length])
        place += length
        if kind in (FULL, LAST):
            yield b"".join(parts)
            parts = []


def stored(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any], Any]:
    """History rows, config and run record of the one offline run under `folder`."""
    [path] = segments(folder)
    return read(path)


def segments(folder: Path) -> list[Path]:
    """The files of a run's starts, oldest first."""
    return sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_ctime)


def read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any], Any]:
    """History rows, config and run record of one file."""
    from wandb.proto import wandb_internal_pb2

    rows, config, run = [], {}, None
    for payload in payloads(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        if kind == "run":
            run = record.run
            config |= {item.key: json.loads(item.value_json) for item in run.config.update}
    return rows, config, run


def exit_code(folder: Path) -> int | None:
    """The code that the run finished with; None where it never finished."""
    from wandb.proto import wandb_internal_pb2

    [path] = folder.glob("wandb/offline-run-*/*.wandb")
    codes = []
    for payload in payloads(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(payload)
        if record.WhichOneof("record_type") == "exit":
            codes.append(record.exit.exit_code)
    return codes[-1] if codes else None


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
