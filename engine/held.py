"""What this rank holds of weights and optimizer states, as boxes of the stored model.

fp32 master weights and AdamW's moments are reached in place: ZeRO's flat partitions through the fragments that
DeepSpeed links to each parameter, plain fp32 through the optimizer's own state. So a save moves no value between ranks,
and a load writes straight into the partitions. Not here: files (engine/storage.py), when to save
(engine/checkpoints.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager

from engine.checkpoint_folder import MOMENTS, WEIGHTS
from engine.device import Device
from engine.step import Trainer
from model.huggingface_names import Stored
from model.placement import Box, boxes
from parallel.groups import AxisGroup, Groups


class Pieces:
    """The boxes of one stored tensor that this rank saves: a checkpointable of torch.distributed.checkpoint."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = torch.Size(shape)
        self.tensors: dict[torch.Size, Tensor] = {}  # by offsets

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(offsets, tensor.shape), TensorProperties(tensor.dtype), self.shape
                ),
            )
            for offsets, tensor in self.tensors.items()
        ]


class PiecesPlanner(DefaultSavePlanner):
    """DCP's planner, over pieces."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensors[index.offset]


class HostCopy(AsyncStager):
    """Copies pieces to host memory that is kept from save to save (pinned where they come from a GPU)."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.buffers: dict[tuple[str, torch.Size], torch.Tensor] = {}

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        staged = {}
        for name, pieces in state_dict.items():
            copy = Pieces(tuple(pieces.shape))
            for offsets, tensor in pieces.tensors.items():
                buffer = self.buffers.get((name, offsets))
                if buffer is None:
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.device.kind == "cuda")
                    self.buffers[name, offsets] = buffer
                copy.tensors[offsets] = buffer.copy_(tensor.detach(), non_blocking=True)
            staged[name] = copy
        self.device.synchronize()
        return staged

    def synchronize_staging(self) -> None:
        """`stage` has waited already."""

    def close(self) -> None:
        self.buffers.clear()


@dataclass(frozen=True)
class Run:
    """Values [start, start + n) of a parameter's local part: `tensors` [n] by kind."""

    parameter: nn.Parameter
    start: int
    tensors: dict[str, Tensor]


def pieces_to_save(trainer: Trainer, places: Mapping[str, Stored], groups: Groups) -> dict[str, Pieces]:
    """This rank's share of the checkpoint, "kind/stored name" -> boxes: over all ranks, each value exactly once.

    places: of all that is trained.
    """
    found: dict[str, Pieces] = {}
    mine = {id(parameter) for parameter in _saved_here(trainer.module, groups.tensor)}
    for run in held_runs(trainer, share_of=groups.data):
        if id(run.parameter) not in mine:
            continue
        info, count = run.parameter.info, run.tensors[WEIGHTS].numel()  # type: ignore[attr-defined]
        for box in boxes(info, places, tensor_rank=groups.tensor.rank, start=run.start, count=count):
            for kind, tensor in run.tensors.items():
                pieces = found.setdefault(f"{kind}/{box.name}", Pieces(box.shape))
                pieces.tensors[torch.Size(box.offsets)] = box.view(tensor)
    return found


def boxes_to_load(trainer: Trainer, places: Mapping[str, Stored], groups: Groups) -> Iterator[tuple[str, Box, Tensor]]:
    """(kind, box, where its values go) for everything this rank trains, working copies of the weights included."""
    for run in held_runs(trainer):
        yield from _filled(run, places, groups)
    parameter: Any
    for parameter in trainer.module.parameters():
        if hasattr(parameter, "ds_id"):
            yield from _filled(_zero3_run(parameter, {WEIGHTS: parameter.ds_tensor}), places, groups)
        elif parameter.requires_grad:
            yield from _filled(Run(parameter, 0, {WEIGHTS: parameter.data.view(-1)}), places, groups)


def frozen_boxes(trainer: Trainer, places: Mapping[str, Stored], groups: Groups) -> Iterator[tuple[str, Box, Tensor]]:
    """The same for the weights beside adapters, which have no other copy."""
    for parameter in trainer.module.parameters():
        if not parameter.requires_grad:
            yield from _filled(Run(parameter, 0, {WEIGHTS: parameter.data.view(-1)}), places, groups)


def _filled(run: Run, places: Mapping[str, Stored], groups: Groups) -> Iterator[tuple[str, Box, Tensor]]:
    info, count = run.parameter.info, next(iter(run.tensors.values())).numel()  # type: ignore[attr-defined]
    for box in boxes(info, places, tensor_rank=groups.tensor.rank, start=run.start, count=count):
        yield from ((kind, box, box.view(tensor)) for kind, tensor in run.tensors.items())


def held_runs(trainer: Trainer, *, share_of: AxisGroup | None = None) -> Iterator[Run]:
    """The fp32 weights and moments on this rank, by trained parameter. Makes moments that do not exist yet.

    share_of: what all ranks of this axis hold alike (ZeRO 0) is divided among them.
    """
    states, flats = _torch_optimizer(trainer.engine).state, _flat_parameters(trainer.engine)
    _make_states(trainer.engine)
    for parameter in (one for one in trainer.module.parameters() if one.requires_grad):
        if hasattr(parameter, "ds_id"):
            yield _zero3_run(parameter, _zero3_tensors(parameter, states))
        elif hasattr(parameter, "_hp_mapping"):
            fragment = parameter._hp_mapping
            if fragment is not None:
                state, place = states[flats[fragment.param_group_index]], fragment.hp_fragment_address
                moments = {kind: state[kind].narrow(0, place.start, place.numel) for kind in MOMENTS}
                yield Run(parameter, fragment.lp_fragment_address.start, {WEIGHTS: fragment.hp_fragment} | moments)
        else:
            parts, part = (1, 0) if share_of is None else (share_of.size, share_of.rank)
            share = -(-parameter.numel() // parts)
            start = min(part * share, parameter.numel())
            count = min(share, parameter.numel() - start)
            whole = {WEIGHTS: parameter.data} | {kind: states[parameter][kind] for kind in MOMENTS}
            if count:
                yield Run(parameter, start, {k: t.view(-1).narrow(0, start, count) for k, t in whole.items()})


def optimizer_steps(trainer: Trainer) -> int:
    """Updates made so far: AdamW's own count, which skipped steps do not raise."""
    steps = {int(state["step"]) for state in _torch_optimizer(trainer.engine).state.values() if "step" in state}
    assert len(steps) <= 1, f"parameters have seen different numbers of updates: {sorted(steps)}"
    return max(steps, default=0)


def set_optimizer_steps(trainer: Trainer, count: int) -> None:
    _make_states(trainer.engine)
    for state in _torch_optimizer(trainer.engine).state.values():
        state["step"].fill_(count)


SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def loss_scale_state(trainer: Trainer) -> dict[str, Any]:
    """What fp16's dynamic loss scaling has learnt; empty in other precisions."""
    scaler = _dynamic_scaler(trainer.engine)
    return {name: getattr(scaler, name) for name in SCALER_FIELDS if hasattr(scaler, name)}


def set_loss_scale_state(trainer: Trainer, state: dict[str, Any]) -> None:
    scaler = _dynamic_scaler(trainer.engine)
    for name, value in state.items() if scaler is not None else ():
        setattr(scaler, name, value)


def _dynamic_scaler(engine: Any) -> Any:
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return scaler if getattr(scaler, "dynamic", False) else None


def _saved_here(module: nn.Module, tensor: AxisGroup) -> Iterator[nn.Parameter]:
    """Parameters whose copy on this rank is the one that is saved: the first of replicated and tied ones."""
    names = set()
    for parameter in module.parameters():
        info = parameter.info  # type: ignore[attr-defined]
        tied_copy = getattr(parameter, "ds_pipe_replicated", False) or info.name in names
        names.add(info.name)
        if not tied_copy and tensor.rank % info.replicas == 0:
            yield parameter


def _torch_optimizer(engine: Any) -> torch.optim.Optimizer:
    """The AdamW inside whatever DeepSpeed wrapped around it."""
    optimizer = engine.optimizer
    while not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _flat_parameters(engine: Any) -> list[Tensor]:
    """The tensors that AdamW updates: ZeRO's flat partitions, or the parameters."""
    for name in (
        "fp32_partitioned_groups_flat",  # ZeRO 3
        "single_partition_of_fp32_groups",  # ZeRO 1 and 2
        "fp32_groups_flat_partition",  # BF16_Optimizer
    ):
        if hasattr(engine.optimizer, name):
            return list(getattr(engine.optimizer, name))
    return [parameter for group in _torch_optimizer(engine).param_groups for parameter in group["params"]]


def _make_states(engine: Any) -> None:
    """AdamW's states as its first step would make them."""
    states = _torch_optimizer(engine).state
    for flat in _flat_parameters(engine):
        if not states[flat]:
            states[flat] |= {"step": torch.zeros((), device=flat.device)}
            states[flat] |= {kind: torch.zeros_like(flat, requires_grad=False) for kind in MOMENTS}


def _zero3_tensors(parameter: Any, states: Any) -> dict[str, Tensor]:
    optimizer = parameter._z3_optimizer
    group, offset, count = optimizer.grad_position[optimizer.get_param_id(parameter)]
    flat = optimizer.fp32_partitioned_groups_flat[group]
    return {
        kind: tensor.narrow(0, offset, count) for kind, tensor in ({WEIGHTS: flat} | _moments(states[flat])).items()
    }


def _moments(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {kind: state[kind] for kind in MOMENTS}


def _zero3_run(parameter: Any, padded: dict[str, Tensor]) -> Run:
    """A ZeRO-3 partition without the padding at the parameter's end."""
    size = parameter.ds_tensor.numel()
    start = min(parameter._z3_optimizer._get_param_partition_rank(parameter) * size, parameter.ds_numel)
    count = min(size, parameter.ds_numel - start)
    return Run(parameter, start, {kind: tensor.view(-1).narrow(0, 0, count) for kind, tensor in padded.items()})
