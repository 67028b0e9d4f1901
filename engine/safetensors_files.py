"""Files of whole tensors in the safetensors format, read and written one tensor at a time in bounded memory.

Reads and writes go through read and pwrite, not a memory map, whose pages would count as this process's memory. A
header is checked against the size of its file before any value is read. The format: an 8-byte length, a JSON header
(name -> dtype, shape, first and last byte), the values. Not here: boxes of tensors that many ranks write or read at
once (`engine.storage`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INDEX = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LONGEST_HEADER = 100_000_000  # bytes; the format's own limit


@dataclass(frozen=True)
class Spec:
    """What a tensor is: `dtype` by the format's name."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: bytes [begin, begin + size) of `file`."""

    file: Path
    spec: Spec
    begin: int


def read_header(path: Path) -> dict[str, Place]:
    """The tensors of a file. Raises ValueError naming the file where it is torn, or a tensor of a dtype not known."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST_HEADER):
            raise ValueError(f"{path} is no whole safetensors file: {size} bytes are too few for its header")
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        found = {name: _place(path, name, about, 8 + length) for name, about in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ValueError) and str(error).startswith(str(path)):
            raise
        raise ValueError(f"{path} is no safetensors file: its header cannot be read ({error})") from None
    end = max((place.begin + place.spec.bytes for place in found.values()), default=8 + length)
    if end > size:
        raise ValueError(f"{path} is cut off: its tensors end at byte {end}, the file at {size}")
    return found


def _place(path: Path, name: str, about: Mapping[str, Any], start: int) -> Place:
    first, last = about["data_offsets"]
    if about["dtype"] not in DTYPES:
        raise ValueError(f"{path}: {name} is {about['dtype']}; weights in {', '.join(DTYPES)} are supported")
    spec = Spec(about["dtype"], tuple(about["shape"]))
    if last - first != spec.bytes:
        raise ValueError(f"{path}: {name} of shape {spec.shape} has {last - first} bytes, not {spec.bytes}")
    return Place(path, spec, start + first)


class TensorFolder:
    """The tensors of a folder, one file or several with an index. Raises ValueError where a file or a tensor lacks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places: dict[str, Place] = {}
        index = folder / INDEX
        if index.exists():
            files = _indexed(index)
            for file in dict.fromkeys(files.values()):
                if not (folder / file).is_file():
                    raise ValueError(f"{folder / file} is missing; {INDEX} names it")
                held = read_header(folder / file)
                lacking = [name for name, where in files.items() if where == file and name not in held]
                if lacking:
                    raise ValueError(f"{folder / file} has no tensor {lacking[0]}, which {INDEX} says it has")
                self.places |= held
            return
        for path in sorted(folder.glob("*.safetensors")):
            self.places |= read_header(path)
        if not self.places:
            raise ValueError(f"{folder} holds no .safetensors file with tensors")

    def spec(self, name: str) -> Spec:
        return self.places[name].spec

    def read(self, name: str) -> Tensor:
        """A tensor of its own memory."""
        place = self.places[name]
        values = bytearray(place.spec.bytes)
        with place.file.open("rb", buffering=0) as file:
            file.seek(place.begin)
            view = memoryview(values)
            while view:
                count = file.readinto(view)
                if not count:
                    raise ValueError(f"{place.file} is cut off within {name}")
                view = view[count:]
        if not values:
            return torch.empty(place.spec.shape, dtype=DTYPES[place.spec.dtype])
        return torch.frombuffer(values, dtype=DTYPES[place.spec.dtype]).view(place.spec.shape)


def _indexed(index: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    try:
        files = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is no index of weights: {error!r}") from None
    for file in files.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index} names {file!r}, which is no file of its folder")
    return files


class TensorWriter:
    """Writes tensors one at a time, in any order, into files of at most `max_bytes` as transformers lays them out.

    The files have their final size from the start; `finish` flushes them and writes the index. One file has no index.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Spec], *, max_bytes: int) -> None:
        self.folder, self.tensors = folder, dict(tensors)
        groups = packed({name: spec.bytes for name, spec in tensors.items()}, max_bytes=max_bytes)
        self.files: dict[str, str] = {}
        self._begins: dict[str, int] = {}
        for number, names in enumerate(groups, start=1):
            several = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
            file = f"model{several}.safetensors"
            self._begins |= create_file(folder / file, {name: tensors[name] for name in names})
            self.files |= dict.fromkeys(names, file)
        self._open = {file: os.open(folder / file, os.O_WRONLY) for file in dict.fromkeys(self.files.values())}

    def write(self, name: str, tensor: Tensor) -> None:
        spec = self.tensors[name]
        assert (NAMES[tensor.dtype], tuple(tensor.shape)) == (spec.dtype, spec.shape), name
        write_at(self._open[self.files[name]], memory_of(tensor), self._begins[name])

    def finish(self) -> None:
        for descriptor in self._open.values():
            os.fsync(descriptor)
        self.close()
        if len(set(self.files.values())) > 1:
            write_index(self.folder, self.files, total=sum(spec.bytes for spec in self.tensors.values()))

    def close(self) -> None:
        """Also where nothing was finished."""
        while self._open:
            os.close(self._open.popitem()[1])


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the host, C order; numpy has no bf16."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def packed(sizes: Mapping[str, int], *, max_bytes: int) -> list[list[str]]:
    """Names in order, a new file where the next tensor would make one larger than max_bytes."""
    files: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if files[-1] and held + size > max_bytes:
            files.append([])
            held = 0
        files[-1].append(name)
        held += size
    return files


def create_file(path: Path, tensors: Mapping[str, Spec]) -> dict[str, int]:
    """A safetensors file without its values: length of the header, header, room. First byte of each tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, spec in tensors.items():
        begin, end = end, end + spec.bytes
        header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return {name: 8 + len(text) + header[name]["data_offsets"][0] for name in tensors}


def write_index(folder: Path, files: Mapping[str, str], *, total: int) -> None:
    index = {"metadata": {"total_size": total}, "weight_map": dict(files)}
    (folder / INDEX).write_text(json.dumps(index, indent=2))
