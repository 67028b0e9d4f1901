"""What a corpus source's path means: which files, in which order, and a fingerprint of them.

Resolving reads folders and file sizes only, no text (readers.py does). Order is by path, so it is the same on every
machine that holds the same files. Relative paths are relative to the folder of the call.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path

from conf.schema import CorpusSource

DATA_SUFFIXES = (".txt", ".jsonl", ".parquet", ".csv")  # what a folder is searched for; each but parquet also as .gz
TEXT_SUFFIXES = (".md", ".rst", ".py")  # read as text too where named by a file or a glob
MEGATRON_SUFFIXES = (".idx", ".bin")
# Parts of an installed standard library that are not its source: tests, installed packages, compiled files.
NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class SourceFile:
    """One file; kind: txt, jsonl, parquet, csv, or the kind of its source; compressed: gzip."""

    path: str
    kind: str
    compressed: bool
    size: int  # bytes on disk
    mtime_ns: int


@dataclass(frozen=True)
class ResolvedSource:
    """kind: files, saved (a `datasets` folder), hub (a `datasets` name) or megatron (indexed data: its .idx and .bin);
    label: for messages and folder names."""

    label: str
    kind: str
    files: tuple[SourceFile, ...]
    source: CorpusSource

    @property
    def num_bytes(self) -> int:
        """Bytes on disk; 0 where unknown (hub)."""
        return sum(file.size for file in self.files)

    def fingerprint(self) -> str:
        """Of the files' paths, sizes and times and of all that selects text from them (the weight does not)."""
        what = {key: value for key, value in asdict(self.source).items() if key not in ("weight", "eod_id")}
        listing = [[file.path, file.size, file.mtime_ns] for file in self.files]
        if self.kind == "files":
            what = {"text_column": self.source.text_column, "max_documents": self.source.max_documents}
        elif self.kind == "megatron":
            what = {name: getattr(self.source, name) for name in ("split", "max_documents", "eod_id")}
        return hashlib.sha256(json.dumps([self.kind, what, listing], sort_keys=True).encode()).hexdigest()


def resolve(source: CorpusSource, *, knob: str = "data.sources") -> ResolvedSource:
    """Finds the files of `source`; ValueError, which names the knob, where there are none or they cannot be read."""
    path = source.path
    place = Path(path).expanduser()
    prefix = _megatron_prefix(place)
    if prefix is not None and path != "stdlib":
        return ResolvedSource(path, "megatron", _megatron_files(prefix), source)
    if source.eod_id is not None:
        raise ValueError(f"data.sources path={path} eod_id={source.eod_id}: is for Megatron data only; leave it out")
    if path == "stdlib":
        return ResolvedSource("stdlib", "files", _stdlib_files(), source)
    if path.startswith("hf:"):
        local = Path(path.removeprefix("hf:"))
        return ResolvedSource(path, "hub", _listing(local) if local.is_dir() else (), source)
    if place.is_dir():
        if (place / "dataset_info.json").is_file() or (place / "dataset_dict.json").is_file():
            return ResolvedSource(path, "saved", _listing(place), source)
        found = [str(file) for file in _walk(place) if _kind(file) in {suffix[1:] for suffix in DATA_SUFFIXES}]
        if not found:
            indexed = sorted(place.rglob("*.idx"))
            hint = f"; Megatron data goes by its prefix: {str(indexed[0])[:-4]}" if indexed else ""
            raise ValueError(f"{knob} path={path}: the folder holds no {_known()} file{hint}")
    elif place.is_file():
        found = [str(place)]
    else:
        found = sorted(name for name in glob.glob(str(place), recursive=True) if os.path.isfile(name))
        if not found:
            raise ValueError(f"{knob} path={path}: no file matches (from {Path.cwd()})")
    return ResolvedSource(path, "files", tuple(_source_file(Path(name)) for name in found), source)


def _megatron_prefix(place: Path) -> Path | None:
    """What .bin and .idx are appended to: of PREFIX, PREFIX.bin or PREFIX.idx, where either file is there."""
    prefix = place.with_suffix("") if place.suffix in MEGATRON_SUFFIXES else place
    if not prefix.name or (prefix == place and place.exists()):  # a file or folder of just this name
        return None
    there = any(prefix.with_name(prefix.name + suffix).is_file() for suffix in MEGATRON_SUFFIXES)
    return prefix if there else None


def _megatron_files(prefix: Path) -> tuple[SourceFile, ...]:
    found = []
    for suffix in MEGATRON_SUFFIXES:
        path = prefix.with_name(prefix.name + suffix)
        if not path.is_file():
            raise ValueError(f"{path}: no such file; Megatron data is {prefix.name}.idx and {prefix.name}.bin")
        found.append(_found(path, "megatron"))
    return tuple(found)


def _known() -> str:
    return ", ".join(DATA_SUFFIXES) + " (or .gz of these)"


def _kind(path: Path) -> str | None:
    name = path.name.lower().removesuffix(".gz")
    suffix = os.path.splitext(name)[1]
    if suffix in TEXT_SUFFIXES:
        return "text"
    return suffix[1:] if suffix in DATA_SUFFIXES else None


def _source_file(path: Path) -> SourceFile:
    kind = _kind(path)
    if kind is None and path.suffix in MEGATRON_SUFFIXES:
        raise ValueError(
            f"{path}: give each Megatron prefix a data.sources entry of its own: path={path.with_suffix('')}"
        )
    if kind is None:
        raise ValueError(
            f"{path}: a file of this name is not a corpus; known are {_known()}, and {', '.join(TEXT_SUFFIXES)}"
        )
    compressed = path.name.lower().endswith(".gz")
    if compressed and kind == "parquet":
        raise ValueError(f"{path}: parquet compresses inside; unpack it first")
    return _found(path, "txt" if kind == "text" else kind, compressed=compressed)


def _found(path: Path, kind: str, *, compressed: bool = False) -> SourceFile:
    if not os.access(path, os.R_OK):
        raise ValueError(f"{path}: no permission to read it")
    status = path.stat()
    return SourceFile(os.path.abspath(path), kind, compressed, status.st_size, status.st_mtime_ns)


def _walk(folder: Path) -> list[Path]:
    """All files below, sorted by path, hidden ones left out."""

    def refuse(error: OSError) -> None:
        raise ValueError(f"{error.filename}: the folder cannot be read ({error.strerror})")

    found = []
    for top, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(top, name) for name in names if not name.startswith(".")]
    return sorted(found)


def _listing(folder: Path) -> tuple[SourceFile, ...]:
    files = []
    for path in _walk(folder):
        status = path.stat()
        files.append(SourceFile(os.path.abspath(path), "datasets", False, status.st_size, status.st_mtime_ns))
    return tuple(files)


def _stdlib_files() -> tuple[SourceFile, ...]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for top, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_STDLIB]
        found += [Path(top, name) for name in names if name.endswith(".py")]
    if not found:
        raise ValueError(f"{root} holds no .py file: its library is packed; name another data.sources path")
    return tuple(_source_file(path) for path in sorted(found, key=lambda path: path.relative_to(root).as_posix()))
