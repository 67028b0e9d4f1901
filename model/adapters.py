"""Which layers of a model get low-rank adapters, and what transformers and PEFT call them.

An adapter belongs to a module of transformers' model, not to a matrix of ours: query, key and value are three in Llama
and one in GPT-2, whatever the plan fuses. So everything follows from where the canonical tensors lie in transformers'
state dict. Not here: how an adapter is split (model/tensor_parallel/lora.py), and files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from torch import nn

from conf.schema import LoraConfig, ModelConfig
from model.huggingface_names import Stored, stored_tensors
from model.layers import LayerSpec
from model.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from model.tensor_parallel.lora import Adapter, ColumnLora, RowLora, Rows
from model.tensor_parallel.parameter import ParameterInfo, Section
from model.tensor_parallel.qkv import QKVParallelLinear
from model.tensor_parallel.random import RandomStreams
from parallel.adapters import is_target
from parallel.groups import AxisGroup

PREFIX = "base_model.model."  # of every name in a PEFT adapter


def adapted_modules(model: ModelConfig, targets: Sequence[str]) -> dict[str, list[tuple[str, Stored]]]:
    """Module in transformers -> (canonical weight, its place in the module's), for each that gets an adapter."""
    modules: dict[str, list[tuple[str, Stored]]] = {}
    for ours, place in stored_tensors(model).items():
        module, _, leaf = place.name.rpartition(".")
        if ours.startswith("blocks.") and leaf == "weight" and "norm" not in ours.split(".")[-2]:
            modules.setdefault(module, []).append((ours, place))
    return {module: held for module, held in modules.items() if is_target(module, targets)}


def trained_tensors(model: ModelConfig, lora: LoraConfig) -> dict[str, Stored]:
    """Canonical name -> place in a checkpoint, of all that a run trains: the adapters, or the whole model."""
    return adapter_tensors(model, lora) if lora.rank > 0 else stored_tensors(model)


def adapter_tensors(model: ModelConfig, lora: LoraConfig) -> dict[str, Stored]:
    """Canonical name of each tensor of the adapters -> its place in PEFT's file."""
    places = {}
    for module, held in adapted_modules(model, lora.target_modules).items():
        places[f"{module}.lora_A.weight"] = Stored(f"{PREFIX}{module}.lora_A.weight")
        b = f"{PREFIX}{module}.lora_B.weight"
        if len(held) == 1:
            places[f"{module}.lora_B.weight"] = Stored(b)
        for ours, place in held if len(held) > 1 else ():
            section = dataclasses.replace(place, name=b, transposed=False)
            places[f"{module}.{_label(ours)}.lora_B.weight"] = section
    return places


def _label(canonical: str) -> str:
    """query of blocks.0.attention.query.weight."""
    return canonical.split(".")[-2]


def with_adapters(
    specs: Sequence[LayerSpec],
    *,
    model: ModelConfig,
    lora: LoraConfig,
    tensor: AxisGroup,
    streams: RandomStreams,
    sequence_parallel: bool,
    seed: int,
) -> list[LayerSpec]:
    """The same layers, frozen, with adapters beside the matrices that `lora` names."""
    of_weight = {
        ours: module for module, held in adapted_modules(model, lora.target_modules).items() for ours, _ in held
    }
    adapter = Adapter(lora.rank, lora.alpha, lora.dropout, seed)
    shared: dict[str, Any] = dict(tensor=tensor, streams=streams)

    def adapted(build: Callable[[], nn.Module]) -> nn.Module:
        layer = build()
        layer.requires_grad_(False)
        for part in list(layer.modules()):
            if isinstance(part, RowParallelLinear):
                info = part.weight.info  # type: ignore[attr-defined,union-attr]
                if info.name in of_weight:
                    sizes = dict(in_features=info.global_shape[1], out_features=info.global_shape[0])
                    part.lora = RowLora(adapter, of_weight[info.name], **sizes, **shared)
            elif isinstance(part, (ColumnParallelLinear, QKVParallelLinear)):
                rows = _rows(part, of_weight)
                if any(run.name is not None for run in rows):
                    part.lora = ColumnLora(
                        adapter, rows, in_features=part.weight.shape[1], sequence_parallel=sequence_parallel, **shared
                    )
        return layer

    def make(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        return lambda: adapted(build)

    return [dataclasses.replace(spec, build=make(spec.build)) for spec in specs]


def _rows(layer: ColumnParallelLinear | QKVParallelLinear, of_weight: Mapping[str, str]) -> list[Rows]:
    """The layer's rows in their order, those of one adapter together."""
    weights = [layer.weight, getattr(layer, "kv_weight", None)]
    infos: list[ParameterInfo] = [w.info for w in weights if w is not None]  # type: ignore[attr-defined,union-attr]
    runs = []
    for info in infos:
        sections = info.sections or (Section(info.name, info.global_shape[0]),)
        for name, group in groupby(sections, key=lambda section: of_weight.get(section.name)):
            runs.append(Rows(name, tuple((_label(one.name), one.size) for one in group), info.replicas))
    return runs


def peft_config(model: ModelConfig, lora: LoraConfig, *, base: str | None) -> dict[str, Any]:
    """The content of adapter_config.json with which PEFT loads these adapters onto the weights of `base`."""
    modules = adapted_modules(model, lora.target_modules)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(modules) if _is_partial(lora.target_modules) else sorted(_last(modules)),
        "fan_in_fan_out": any(place.transposed for held in modules.values() for _, place in held),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def adapter_differences(theirs: Mapping[str, Any], model: ModelConfig, lora: LoraConfig) -> list[str]:
    """Why PEFT's adapters with this adapter_config.json are not those of `lora`."""
    ours = peft_config(model, lora, base=None)
    aside = ["target_modules", "base_model_name_or_path", "lora_dropout", "inference_mode", "init_lora_weights"]
    aside += ["task_type", "fan_in_fan_out"]  # the last: PEFT sets it by what it finds
    lines = [
        f"{key} is {theirs[key]} there and {ours[key]} here"
        for key in ours
        if key not in aside and key in theirs and theirs[key] != ours[key]
    ]
    unknown = ("rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform", "layer_replication")
    return lines + [f"it has {key}={theirs[key]}, which is not known here" for key in unknown if theirs.get(key)]


def _last(modules: Iterable[str]) -> set[str]:
    return {module.rpartition(".")[2] for module in modules}


def _is_partial(targets: Sequence[str]) -> bool:
    """Whether a target names more than a module's last part, so that this part alone would name others too."""
    return any("." in target for target in targets)
