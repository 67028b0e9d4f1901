"""Reads a .wandb file: LevelDB's log framing (blocks of 32 KiB; records of checksum, length, type) around wandb's
own protobuf messages. wandb 0.31 ships no Python reader any more.

Of one file. The starts of a run that went on are files of their own: `segments` finds them in their order.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = b":W&B"
BLOCK = 32768
RECORD_HEADER = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


@dataclass(frozen=True)
class WandbFile:
    """rows: its history; run: wandb's RunRecord, None where none was written; exit_code: None where it never finished;
    torn: its last record is not whole."""

    path: Path
    rows: Sequence[dict[str, Any]]
    config: dict[str, Any]
    run: Any
    exit_code: int | None
    torn: bool


def segments(folder: Path) -> list[Path]:
    """The files of a run's starts in the folder of a run, oldest first."""
    return sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_ctime)


def payloads(path: Path) -> Iterator[bytes]:
    """The records' bytes; of a torn last one what there is. ValueError where it is no such file."""
    data = path.read_bytes()
    if data[:4] != MAGIC:
        raise ValueError(f"{path} is not a wandb file")
    yield from _records(data, 7)


def _records(data: bytes, place: int) -> Iterator[bytes]:
    """Of bytes that begin with a block; what began in a block before them is left out."""
    parts: list[bytes] | None = None
    while place + RECORD_HEADER.size <= len(data):
        left = BLOCK - place % BLOCK
        if left < RECORD_HEADER.size:
            place += left
            continue
        _, length, kind = RECORD_HEADER.unpack_from(data, place)
        place += RECORD_HEADER.size
        if kind in (FULL, FIRST):
            parts = []
        if parts is not None:
            parts.append(data[place : place + length])
        place += length
        if kind in (FULL, LAST) and parts is not None:
            yield b"".join(parts)
            parts = None


def is_finished(path: Path) -> bool:
    """Whether the end of the run is in the file, by its last blocks: a run's file can be large."""
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    start = max(0, path.stat().st_size // BLOCK - 3) * BLOCK
    with path.open("rb") as file:
        file.seek(start)
        tail = file.read()
    for payload in _records(tail, 0 if start else 7):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        try:
            record.ParseFromString(payload)
        except DecodeError:
            return False
        if record.WhichOneof("record_type") == "exit":
            return True
    return False


def read_file(path: Path) -> WandbFile:
    """Everything of one file that training wrote."""
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    rows: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    run, code, torn = None, None, False
    for payload in payloads(path):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        try:
            record.ParseFromString(payload)
        except DecodeError:
            torn = True
            break
        kind = record.WhichOneof("record_type")
        if kind == "history":
            rows.append(_plain(record.history.item))
        elif kind == "run":
            run = record.run
            config |= {item.key: json.loads(item.value_json) for item in run.config.update}
        elif kind == "exit":
            code = record.exit.exit_code
    return WandbFile(path, rows, config, run, code, torn)


def _plain(items: Any) -> dict[str, Any]:
    values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
    return {key: NOT_FINITE.get(value, value) if isinstance(value, str) else value for key, value in values.items()}
