"""Checkpoint files: whole tensors in plain safetensors, written by all ranks at once, each its own boxes in place.

`BoxWriter` is a storage writer for torch.distributed.checkpoint (DCP), which plans, checks that the boxes of all ranks
tile every tensor exactly, and tells every rank when one fails. DCP's own HuggingFaceStorageWriter does not fit: it
writes one file of shards a rank, keyed by name, so two boxes of one tensor on a rank collide, a file is held in memory
twice, and whole tensors need a second pass over all bytes. Here the place of each tensor is known from its shape before
anything is written, so a rank needs no memory beyond a box a writing thread and nothing is written twice. Ranks on
several machines need a shared file system that keeps disjoint writes to one file apart (POSIX; pwrite, no mmap).

Layout of a folder: KIND/model-00001-of-0000N.safetensors and KIND/model.safetensors.index.json, transformers' own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from corpus.cache import file_digest, sync_folder
from engine import last_state
from engine.checkpoint_folder import DamagedError, read_manifest
from engine.distributed import broadcast, gather
from engine.safetensors_files import INDEX, Spec, create_file, packed, write_at, write_index
from model.placement import Box

MAX_FILE_BYTES = 4 * 2**30
WRITERS = 2  # threads of a rank: one copies while another waits for the disk
ITEM = 4  # bytes of an fp32 value


@dataclass(frozen=True)
class Checksum:
    """xxh3_64 of the values [sizes] at `offsets` of a tensor, C order; file: relative to the checkpoint's folder."""

    file: str
    tensor: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    xxh3_64: str


class BoxWriter(StorageWriter):
    """Writes fp32 boxes named "kind/tensor" under `folder`; `on_finish(checksums)` runs on the first rank when the
    bytes of all ranks are on disk.
    """

    def __init__(self, folder: Path, *, on_finish: Callable[[list[Checksum]], None]) -> None:
        self.folder = folder
        self.on_finish = on_finish

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Each save has a writer of its own."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up before the plans are known."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the first rank: lay out and create the files, and tell each rank where its tensors begin."""
        shapes = {item.index.fqn: _tensor_data(item).size for plan in plans for item in plan.items}
        shutil.rmtree(self.folder, ignore_errors=True)  # left by a save that was killed
        places = _create_files(self.folder, {name: tuple(shape) for name, shape in sorted(shapes.items())})
        return [
            replace(plan, storage_data={item.index.fqn: places[item.index.fqn] for item in plan.items})
            for plan in plans
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's boxes: a thread a file, so that one is flushed while the next is written."""
        by_file: dict[str, list[WriteItem]] = {}
        for item in plan.items:
            by_file.setdefault(plan.storage_data[item.index.fqn][0], []).append(item)

        def write(file: str) -> list[WriteResult]:
            descriptor = os.open(self.folder / file, os.O_WRONLY)
            try:
                results = []
                for item in by_file[file]:
                    last_state.now("write")
                    begin = plan.storage_data[item.index.fqn][1]
                    results.append(_write_item(item, planner.resolve_data(item), descriptor, file=file, begin=begin))
                os.fsync(descriptor)
                return results
            finally:
                os.close(descriptor)

        with ThreadPoolExecutor(WRITERS, thread_name_prefix="checkpoint-writer") as pool:
            results = [result for of_file in pool.map(write, by_file) for result in of_file]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Any, results: list[list[WriteResult]]) -> None:
        self.on_finish([result.storage_data for of_rank in results for result in of_rank])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


class StoredTensors:
    """Reads boxes of a checkpoint's folder, or of any folder of folders of safetensors; each file is mapped once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}

    def checked(self, kinds: Sequence[str]) -> dict[str, Any]:
        """The manifest, after all ranks together have read every byte of the given folders. Called on all ranks alike;
        raises DamagedError, on all.
        """
        try:
            answer: dict[str, Any] | DamagedError = read_manifest(self.folder)
        except DamagedError as error:
            answer = error
        manifest = broadcast(answer)
        if isinstance(manifest, DamagedError):
            raise manifest
        rank, ranks = dist.get_rank(), dist.get_world_size()
        wanted = tuple(f"{kind}/" for kind in kinds)
        share = [Checksum(**one) for one in manifest["checksums"][rank::ranks] if one["file"].startswith(wanted)]
        heads = {file: head for file, head in list(manifest["heads"].items())[rank::ranks] if file.startswith(wanted)}
        problems = [problem for problem in gather(self.damage(share, heads=heads)) if problem is not None]
        if problems:
            raise DamagedError(f"checkpoint {self.folder} is damaged: {problems[0]}")
        return manifest

    def damage(self, checksums: Iterable[Checksum], *, heads: Mapping[str, str]) -> str | None:
        """The first box, or head of a file, that cannot be read or is not what was written, in words; None: all are."""
        for file, digest in heads.items():
            path = self.folder / file
            if not path.is_file() or head_digest(path) != digest:
                return f"{file} is missing, or does not begin as it was written"
        for one in checksums:
            last_state.now("check", tensor=one.tensor)
            try:
                values = self._box(one.file, one.tensor, one.offsets, one.sizes)
            except (OSError, SafetensorError) as error:
                return f"{one.file} cannot be read: {error}"
            if _digest(values.numpy()) != one.xxh3_64:
                return f"{one.file}: the values of {one.tensor} at {list(one.offsets)} are not those that were written"
        return None

    def load(self, boxes: Iterable[tuple[str, Box, Tensor]], *, called: Mapping[str, str] | None = None) -> None:
        """Fill each (kind, box, tensor [box.sizes]). Raises ValueError naming a tensor that is not there.

        `called`: what the folder calls tensors whose name there is another.
        """
        called = called or {}
        maps: dict[str, Mapping[str, str]] = {}
        for kind, box, target in boxes:
            last_state.now("load", tensor=f"{kind}/{box.name}")
            if kind not in maps:
                maps[kind] = weight_map(self.folder / kind)
            name = called.get(box.name, box.name)
            if name not in maps[kind]:
                raise ValueError(f"{self.folder / kind} has no tensor {name}; it holds {len(maps[kind])} others")
            file = f"{kind}/{maps[kind][name]}"
            stored = tuple(self._opened(file).get_slice(name).get_shape())
            if stored != box.shape:
                raise ValueError(f"{self.folder / file}: {name} is {stored}, the model needs {box.shape}")
            with torch.no_grad():
                target.copy_(self._box(file, name, box.offsets, box.sizes))

    def _opened(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = safe_open(self.folder / file, framework="pt")  # maps the file: slices are views
        return self._files[file]

    def _box(self, file: str, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        place = tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
        return self._opened(file).get_slice(name)[place]


def weight_map(folder: Path) -> Mapping[str, str]:
    """Tensor name -> file name in a folder of safetensors as transformers writes it, one file or several."""
    if (folder / INDEX).exists():
        return json.loads((folder / INDEX).read_text())["weight_map"]
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as opened:
            found |= dict.fromkeys(opened.keys(), path.name)
    if not found:
        raise ValueError(f"{folder} holds no .safetensors file")
    return found


def weights_fingerprint(folder: Path) -> str:
    """sha256 over the names, sizes and contents (of large files samples) of a folder's safetensors."""
    files = sorted(set(weight_map(folder).values()))
    text = "".join(f"{name} {file_digest(folder / name)}\n" for name in files)
    return hashlib.sha256(text.encode()).hexdigest()


def head_digest(path: Path) -> str:
    """xxh3_64 of what comes before the values of a safetensors file; of any other file whole."""
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            length = file.read(8)
            return xxhash.xxh3_64_hexdigest(length + file.read(min(int.from_bytes(length, "little"), 2**30)))
        return xxhash.xxh3_64_hexdigest(file.read())


def _tensor_data(item: WriteItem) -> Any:
    assert item.tensor_data is not None
    return item.tensor_data


def _create_files(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, int]]:
    """Files of their final size with their headers; "kind/tensor" -> (file, its first byte there)."""
    places: dict[str, tuple[str, int]] = {}
    for kind in sorted({name.partition("/")[0] for name in shapes}):
        of_kind = {name.partition("/")[2]: shape for name, shape in shapes.items() if name.startswith(f"{kind}/")}
        (folder / kind).mkdir(parents=True)
        specs = {name: Spec("F32", shape) for name, shape in of_kind.items()}
        files = packed({name: spec.bytes for name, spec in specs.items()}, max_bytes=MAX_FILE_BYTES)
        for number, names in enumerate(files, start=1):
            file = f"{kind}/model-{number:05d}-of-{len(files):05d}.safetensors"
            begins = create_file(folder / file, {name: specs[name] for name in names})
            places |= {f"{kind}/{name}": (file, begin) for name, begin in begins.items()}
        files_of = {name: Path(places[f"{kind}/{name}"][0]).name for name in of_kind}
        write_index(folder / kind, files_of, total=sum(spec.bytes for spec in specs.values()))
        sync_folder(folder / kind)
    return places


def _write_item(item: WriteItem, tensor: Any, descriptor: int, *, file: str, begin: int) -> WriteResult:
    """Write one box: at once where it is contiguous in the file, else row by row."""
    shape, offsets = _tensor_data(item).size, tuple(_tensor_data(item).chunk.offsets)
    values = np.ascontiguousarray(tensor.detach().cpu().numpy())
    first = begin + int(np.ravel_multi_index(offsets, shape)) * ITEM
    rows = [values] if values.shape[1:] == tuple(shape[1:]) or len(values) == 1 else values
    for number, row in enumerate(rows):
        write_at(descriptor, row.data.cast("B"), first + number * shape[-1] * ITEM)
    name = item.index.fqn.partition("/")[2]
    checksum = Checksum(file, name, offsets, tuple(values.shape), _digest(values))
    return WriteResult(item.index, values.nbytes, checksum)


def digest_of(tensor: Tensor) -> str:
    """As a Checksum has it."""
    return _digest(tensor.numpy())


def _digest(values: np.ndarray) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(values).data.cast("B"))
