"""A folder of transformers' weights read once, tensor by tensor, into a folder of ours: `recipes/convert.py import`.

    OUT/weights/       fp32 under transformers' names, config.json, the tokenizer's files and generation_config.json
        manifest.json  the model's knobs, a checksum of every tensor, and where it came from: each tensor's own dtype
                       and name and the config.json as it was, so that an export gives the same bits back

`initialize_from=OUT` starts training with it under any plan. Nothing is written where anything is wrong: the names,
shapes and files are checked before the first byte, and the folder gets its name when it is whole. At most a tensor and
its fp32 copy are in memory. Not here: the way back (`engine.weights_export`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.huggingface import CONFIG, model_of, read_config
from conf.huggingface_config import huggingface_config
from conf.load import to_plain
from conf.model_folders import label_of
from conf.schema import ModelConfig
from corpus.cache import sync_folder
from corpus.tokenizer_folder import copy_files, token_ids
from engine.checkpoint_folder import FORMAT, WEIGHTS, write_manifest
from engine.safetensors_files import INDEX, Spec, TensorWriter
from engine.storage import MAX_FILE_BYTES, Checksum, digest_of, head_digest
from engine.weight_folders import Weights, called_there, open_weights, problems_of
from telemetry.run_folder import git_commit, utc_now

GENERATION = "generation_config.json"
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class Imported:
    """What was read."""

    model: ModelConfig
    tensors: int
    dtypes: tuple[str, ...]
    aside: tuple[str, ...]  # tensors of the folder that were left out: copies, buffers, parts for other tasks
    has_tokenizer: bool


def source_folder(given: str) -> Path:
    """The folder that a path or a name on the hub means. Raises ValueError."""
    path = Path(given).expanduser().absolute()
    if path.is_dir():
        return path
    if path.exists() or given.startswith((".", "/", "~")) or given.count("/") != 1:
        raise ValueError(f"{given} is neither a folder nor a name on the hub (OWNER/NAME)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(given, allow_patterns=HUB_FILES))
    except Exception as error:  # of its own kinds, httpx's and requests', by version and fault
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"there is no folder {given}, and the hub does not answer for that name ({reason}); download it where "
            "there is a network (hf download) and name the folder"
        ) from None


def import_weights(source: Path, out: Path, *, ignored: Iterable[str], say: Callable[[str], None]) -> Imported:
    """Read `source` into `out`, which must not exist yet. Raises ValueError with everything that is wrong."""
    config = read_config(source)
    model = model_of(config, name=label_of(source), ignored=ignored)
    weights = open_weights(source)
    if problems := problems_of(weights, model):
        raise ValueError("\n".join(problems))
    called = called_there(weights, model)
    aside = tuple(sorted(set(weights.places) - set(called.values())))
    with new_folder(out) as partial:
        folder = partial / WEIGHTS
        folder.mkdir()
        wanted = {name: Spec("F32", weights.spec(theirs).shape) for name, theirs in sorted(called.items())}
        writer = TensorWriter(folder, wanted, max_bytes=MAX_FILE_BYTES)
        try:
            checksums = list(_written(weights, called, writer, say))
            writer.finish()
        finally:
            writer.close()
        copied = copy_files(source, folder)
        if (source / GENERATION).is_file():
            shutil.copyfile(source / GENERATION, folder / GENERATION)
        (folder / CONFIG).write_text(json.dumps(huggingface_config(model) | token_ids(source), indent=2) + "\n")
        origin = {
            "folder": str(source), "config": config, "names": called,
            "dtypes": {name: weights.spec(theirs).dtype for name, theirs in called.items()},
        }  # fmt: skip
        _write_manifest(partial, model, checksums, origin)
    dtypes = tuple(sorted({weights.spec(theirs).dtype for theirs in called.values()}))
    return Imported(model, len(called), dtypes, aside, has_tokenizer=bool(copied))


def _written(
    weights: Weights, called: Mapping[str, str], writer: TensorWriter, say: Callable[[str], None]
) -> Iterator[Checksum]:
    """Write each tensor as fp32, in the order of the files."""
    for number, name in enumerate(writer.files, start=1):
        tensor = weights.read(called[name]).float()
        writer.write(name, tensor)
        if number % 100 == 0:
            say(f"{number} of {len(writer.files)} tensors")
        shape = tuple(tensor.shape)
        yield Checksum(f"{WEIGHTS}/{writer.files[name]}", name, (0,) * len(shape), shape, digest_of(tensor))


def _write_manifest(partial: Path, model: ModelConfig, checksums: list[Checksum], origin: dict[str, Any]) -> None:
    files = sorted({one.file for one in checksums})
    index = [f"{WEIGHTS}/{INDEX}"] if (partial / WEIGHTS / INDEX).exists() else []
    manifest = {
        "format": FORMAT, "saved": utc_now(), "git_commit": git_commit(), "config": {"model": to_plain(model)},
        "origin": origin,
        "files": {file: (partial / file).stat().st_size for file in files},
        "heads": {file: head_digest(partial / file) for file in [*files, *index, f"{WEIGHTS}/{CONFIG}"]},
        "checksums": [dataclasses.asdict(one) for one in checksums],
    }  # fmt: skip
    write_manifest(partial, manifest)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder under another name, which becomes `out` where the block ends well, and nothing where it does not."""
    out = out.expanduser().absolute()
    if out.exists():
        raise ValueError(f"{out} exists; name a folder that does not")
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"{out} cannot be written: {error.strerror or error}") from None
    try:
        yield partial
        sync_folder(partial)
        partial.rename(out)
        sync_folder(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
