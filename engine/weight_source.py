"""The weights that `initialize_from` means, found and checked on rank 0, and read into a rank's own part.

A run (its newest checkpoint), a checkpoint, an imported folder or one of transformers; adapters of a LoRA checkpoint
stand beside the weights that they were trained beside, those of `lora.initialize_from` beside any. Training has its own
way in (`engine.resume`), as it fills optimizer states too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from conf.load import from_plain
from conf.schema import Config
from conf.weight_sources import resolved
from corpus.prepare import bpe_file
from engine.checkpoint_folder import MANIFEST, WEIGHTS, read_manifest
from engine.initial_weights import adapter_folder
from engine.peft_files import base_of
from engine.storage import StoredTensors, weight_map
from engine.weight_folders import require_model
from model.adapters import adapter_tensors
from model.huggingface_names import names_in_folder, stored_tensors
from model.placement import boxes
from parallel.groups import Groups


@dataclass(frozen=True)
class WeightSource:
    """weights: a folder of safetensors with the whole model; adapter: one with its adapters, or None.

    path: what `initialize_from` means, a checkpoint or a folder; saved: the config of the run that wrote it, None where
    no run of ours did.
    """

    path: Path
    weights: Path
    adapter: Path | None
    saved: Config | None

    @property
    def tokenizer(self) -> str | None:
        """data.tokenizer of the run, the file in place of "bpe"; None where no run says. ValueError: it is gone."""
        if self.saved is None:
            return None
        data = self.saved.data
        return str(bpe_file(data)) if data.tokenizer == "bpe" else data.tokenizer


def find_weights(config: Config) -> WeightSource:
    """What `config.initialize_from` and `config.lora.initialize_from` mean. Raises ValueError where it is not there,
    torn, or another model's than config.model.
    """
    assert config.initialize_from is not None
    said = f"initialize_from={config.initialize_from}"
    path = resolved(config.initialize_from)
    manifest: dict[str, Any] = read_manifest(path) if (path / MANIFEST).is_file() else {}
    adapter = adapter_folder(config)
    weights = path / WEIGHTS if (path / WEIGHTS).is_dir() else path
    if manifest.get("base") is not None:
        adapter, weights = adapter or weights, base_of(path)
    require_model(weights, config.model, said=said)
    saved = from_plain(manifest["config"]) if manifest and "origin" not in manifest else None
    return WeightSource(path, weights, adapter, saved)


def load_source(source: WeightSource, parameters: Iterable[nn.Parameter], config: Config, groups: Groups) -> None:
    """Fill this rank's parameters. Called on all ranks alike; raises DamagedError, or ValueError naming a tensor."""
    parameters = list(parameters)
    places = [(source.weights, stored_tensors(config.model), False)]
    if source.adapter is not None:
        places.append((source.adapter, adapter_tensors(config.model, config.lora), True))
    for folder, named, trained in places:
        stored = StoredTensors(folder.parent)
        if folder.name == WEIGHTS and (folder.parent / MANIFEST).is_file():
            stored.checked((WEIGHTS,))
        called = {} if trained else names_in_folder(weight_map(folder), config.model)[0]
        mine = [parameter for parameter in parameters if _is_adapter(parameter, config) is trained]
        stored.load(
            (
                (folder.name, box, box.view(parameter.data.view(-1)))
                for parameter in mine
                for box in boxes(parameter.info, named, tensor_rank=groups.tensor.rank)  # type: ignore[attr-defined]
            ),
            called=called,
        )


def _is_adapter(parameter: nn.Parameter, config: Config) -> bool:
    """Beside adapters all other weights are frozen."""
    return config.lora.rank > 0 and parameter.requires_grad
