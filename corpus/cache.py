"""Folders that are built once per filesystem: a lock, a temporary folder, one rename.

All ranks may ask for the same folder at the same moment; one builds, the others wait for its lock. The lock is the
kernel's (flock): it ends with the process that holds it, so a killed builder blocks nobody. What it leaves behind is a
temporary folder that the next builder removes; a finished folder appears whole or not at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Progress = Callable[[str], None]
Build = Callable[[Path, Progress], dict[str, Any]]
MANIFEST = "manifest.json"
_BLOCK = 1 << 16  # bytes
_BLOCKS = 256  # 16 MiB at most are read to check a file


def built_once(folder: Path, *, build: Build, what: str, timeout_s: float, progress: Progress) -> dict[str, Any]:
    """The manifest of `folder`, which `build` fills (it returns the manifest) unless a good one is there already.
    `build` gets a temporary folder and where to say how far it is.

    ValueError where another process still builds after timeout_s seconds; errors of `build` pass through.
    """
    manifest, _ = read_manifest(folder)
    if manifest is not None:
        return manifest
    try:
        return _build(folder, build=build, what=what, timeout_s=timeout_s, progress=progress)
    except OSError as error:
        raise ValueError(
            f"data.cache_dir={folder.parent} cannot be written ({error.strerror or error}); free space or name another"
        ) from error


def _build(folder: Path, *, build: Build, what: str, timeout_s: float, progress: Progress) -> dict[str, Any]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(folder.name + ".lock")
    with _locked(lock, what=what, timeout_s=timeout_s, progress=progress) as tell:
        manifest, fault = read_manifest(folder)  # another process may have built it meanwhile
        if manifest is not None:
            return manifest
        for leftover in folder.parent.glob(glob_escape(folder.name) + ".partial-*"):
            shutil.rmtree(leftover)
        if folder.exists():
            tell(f"{what}: {folder} is damaged ({fault}); building it again")
            aside = folder.with_name(f"{folder.name}.partial-damaged-{os.getpid()}")
            folder.rename(aside)  # processes that have it open keep their pages
            shutil.rmtree(aside)
        partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
        partial.mkdir()
        try:
            manifest = build(partial, tell)
            _seal(partial, manifest)
            partial.rename(folder)
            sync_folder(folder.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return manifest


def read_manifest(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """(manifest, "") where the folder is whole, else (None, what is wrong with it)."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None, "no manifest"
    except ValueError:
        return None, "its manifest is not JSON"
    for name, expected in manifest.get("files", {}).items():
        path = folder / name
        if not path.is_file():
            return None, f"{name} is missing"
        if path.stat().st_size != expected["size"]:
            return None, f"{name} has {path.stat().st_size} bytes of {expected['size']}"
        if file_digest(path) != expected["digest"]:
            return None, f"{name} does not match its checksum"
    return manifest, ""


def file_digest(path: Path) -> str:
    """SHA-256 of the size and of up to 256 blocks of 64 KiB spread evenly: all of a file of up to 16 MiB, and of larger
    ones enough to notice lost or zeroed stretches without reading terabytes at each start."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    blocks = -(-size // _BLOCK)
    with open(path, "rb") as file:
        for n in range(min(blocks, _BLOCKS)):
            file.seek((n if blocks <= _BLOCKS else n * (blocks - 1) // (_BLOCKS - 1)) * _BLOCK)
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def glob_escape(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _seal(folder: Path, manifest: dict[str, Any]) -> None:
    """Adds sizes and checksums of the folder's files and writes the manifest, all of it on disk before returning."""
    manifest["files"] = {}
    for path in sorted(folder.iterdir()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        manifest["files"][path.name] = {"size": path.stat().st_size, "digest": file_digest(path)}
    with open(folder / MANIFEST, "w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(path: Path, *, what: str, timeout_s: float, progress: Progress) -> Iterator[Progress]:
    """Holds the lock; gives the builder's `progress`, whose lines the waiting processes show as well."""
    started, told = time.monotonic(), ""
    with open(path, "a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                file.seek(0)
                holder, _, line = file.read().strip().partition("\n")
                holder = holder or "another process"
            if time.monotonic() - started > timeout_s:
                raise ValueError(
                    f"data.wait_timeout_s={timeout_s:g} passed while {holder} prepares {what}; raise it, "
                    "or run recipes/prepare.py first"
                )
            line = line or f"{what}: waiting for {holder}, which prepares it"
            if line != told:
                progress(line)
                told = line
            time.sleep(0.1)

        def tell(line: str) -> None:
            file.seek(0)
            file.truncate()
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n{line}")
            file.flush()
            if line:
                progress(line)

        tell("")
        yield tell  # closing the file gives the lock back
