"""Megatron's indexed data written field by field from the format's description, not with the product's writer."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

CODES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def write_indexed(prefix: Path, documents: Sequence[Sequence[int]], *, dtype: int = 8, **fields: Any) -> Path:
    """One sequence a document, ids of the type that code `dtype` names; fields of the index can be replaced by name."""
    width = np.dtype(CODES[dtype]).itemsize
    lengths = [len(document) for document in documents]
    parts = {
        "magic": b"MMIDIDX\x00\x00",
        "version": 1,
        "code": dtype,
        "num_sequences": len(lengths),
        "num_marks": len(lengths) + 1,
        "lengths": lengths,
        "starts": [sum(lengths[:i]) * width for i in range(len(lengths))],
        "marks": list(range(len(lengths) + 1)),
        "tail": b"",
    } | fields
    index = parts["magic"] + struct.pack(
        "<QBQQ", *(parts[k] for k in ("version", "code", "num_sequences", "num_marks"))
    )
    for name, kind in (("lengths", "<i4"), ("starts", "<i8"), ("marks", "<i8")):
        index += np.array(parts[name], kind).tobytes()
    Path(f"{prefix}.idx").write_bytes(index + parts["tail"])
    Path(f"{prefix}.bin").write_bytes(b"".join(np.array(ids, CODES[dtype]).tobytes() for ids in documents))
    return prefix
