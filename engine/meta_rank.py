"""The layers of one rank on the meta device, run forward and backward for one micro-batch: shapes without values.

torch's fake process group stands in for the other ranks. Counted are what autograd keeps, by kind of layer, and every
collective that torch.distributed is asked for. Kernels are CUDA's: where CUDA keeps other tensors than the meta device
would, `cuda_kernels` calls what torch calls there. Not here: what the ledgers say (`engine.dry_run`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.distributed_c10d import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from engine.tensor_bytes import HeldActivations, Saved
from model.attention import AttentionContext
from model.block import Block
from model.layers import LayerSpec, run_layers
from model.tensor_parallel.random import RandomStreams
from parallel.groups import AxisGroup

META = torch.device("meta")
KIND_OF_LAYER = {"embedding": "embedding", "final_norm": "norms", "transform": "head", "head": "head"}
KIND_OF_PART = {"attention": "attention", "mlp": "mlp", "attention_norm": "norms", "mlp_norm": "norms"}
OPERATIONS = {  # of torch.distributed's dispatcher: our name, which argument is the whole tensor, and which the group
    "c10d::allreduce_": ("all_reduce", 0, 1),
    "c10d::_allgather_base_": ("all_gather", 0, 2),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, 2),
    "c10d::send": ("send_recv", 0, 1),
}
Call = tuple[str, str, str, int, int]  # axis, phase, operation, ranks of the group, bytes


class MetaStage:
    """The layers of one pipeline stage. `shared`: modules of tied layers that the rank has built already."""

    def __init__(
        self, specs: list[LayerSpec], *, dtype: torch.dtype, streams: RandomStreams, shared: dict[str, nn.Module]
    ) -> None:
        self.streams = streams
        self.layers: list[tuple[LayerSpec, nn.Module]] = []
        for spec in specs:
            key = spec.tied_key or spec.name
            if key not in shared:
                with META:
                    shared[key] = spec.build()
                shared[key].to(dtype).train()
            self.layers.append((spec, shared[key]))

    def parameters(self) -> Iterator[nn.Parameter]:
        for _, module in self.layers:
            yield from module.parameters()

    def forward(self, x: Any, held: HeldActivations, *, recompute: str, recompute_interval: int) -> Any:
        """Run the layers with `held` labelled by the kind that keeps a tensor."""
        with ExitStack() as undo:
            functions: list[Callable[[Any], Any]] = []
            for spec, module in self.layers:
                if isinstance(module, Block):
                    _label_parts(module, held, undo)
                    functions.append(module)
                else:
                    call = module if spec.forward_fn is None else partial(spec.forward_fn, module)
                    functions.append(partial(_labelled, held, KIND_OF_LAYER[spec.kind], call))
            held.label = "block_inputs"  # between layers nothing but a checkpoint keeps anything
            return run_layers(
                functions, x, recompute=recompute, recompute_interval=recompute_interval, streams=self.streams
            )


def _labelled(held: HeldActivations, label: str, function: Callable[[Any], Any], x: Any) -> Any:
    before, held.label = held.label, label
    out = function(x)
    held.label = before
    return out


def _label_parts(block: Block, held: HeldActivations, undo: ExitStack) -> None:
    """Hooks that set the label: of each part its own, of the block between its parts dropout's."""
    for module, label in [(block, "dropout"), *((getattr(block, part), kind) for part, kind in KIND_OF_PART.items())]:
        before: list[str] = []

        def enter(*_: Any, label: str = label, before: list[str] = before) -> None:
            before.append(held.label)
            held.label = label

        def leave(*_: Any, before: list[str] = before) -> None:
            held.label = before.pop()

        undo.callback(module.register_forward_pre_hook(enter).remove)
        undo.callback(module.register_forward_hook(leave).remove)
    make = block.context

    def context(*args: Any) -> AttentionContext:
        """A checkpoint holds the context by its closure, where autograd does not see it."""
        made = make(*args)
        before, held.label = held.label, "context"
        masks = [seen.mask for seen in made.visible.values()]
        kept: list[Saved] = [held.hold(t) for t in (*masks, made.cos, made.sin) if t is not None]
        held.label = before
        undo.callback(kept.clear)
        return made

    block.context = context  # type: ignore[assignment, method-assign]
    undo.callback(delattr, block, "context")


class _RMSNorm(torch.autograd.Function):
    """What CUDA's fused kernel keeps: its input, and a number a row in fp32."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32), weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, _, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """Functions whose CUDA kernels keep other tensors than their meta versions, exchanged while the context is open.

    Flash attention (under a mask the memory-efficient kernel, cuDNN's where key-value heads are shared), fused dropout,
    fused RMSNorm. Not a TorchFunctionMode: recomputation in backward would not see it.
    """
    exchanged = {"scaled_dot_product_attention": _attention, "dropout": _dropout, "rms_norm": _rms_norm}
    kept = {name: getattr(F, name) for name in exchanged}
    for name, function in exchanged.items():
        setattr(F, name, function)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(F, name, function)


def _dropout(x: Tensor, p: float) -> Tensor:
    return torch.ops.aten.native_dropout(x, p, True)[0]


def _rms_norm(x: Tensor, shape: tuple[int, ...], weight: Tensor, epsilon: float) -> Tensor:
    return _RMSNorm.apply(x, weight)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, dropout_p: float, is_causal: bool, enable_gqa: bool
) -> Tensor:
    aten = torch.ops.aten
    if attn_mask is None:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
    if enable_gqa:
        return aten._scaled_dot_product_cudnn_attention(q, k, v, attn_mask, True, dropout_p, is_causal)[0]
    mask = attn_mask.expand(q.shape[0], q.shape[1], -1, -1)
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, dropout_p, is_causal)[0]


class CountCollectives(TorchDispatchMode):
    """Counts every call by axis, phase, operation, group and bytes. `phase` is the caller's to set."""

    def __init__(self, axes: dict[str, AxisGroup]) -> None:
        super().__init__()
        self.phase = "forward"
        self.calls: Counter[Call] = Counter()
        self._axes = {axis.process_group.group_name: axis for axis in axes.values() if axis.process_group is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            operation, whole, group = OPERATIONS[func._schema.name]
            tensor = args[whole][0] if isinstance(args[whole], list) else args[whole]
            axis = self._axes[ProcessGroup.unbox(args[group]).group_name]
            number_of_bytes = tensor.numel() * tensor.element_size()
            self.calls[axis.name, self.phase, operation, axis.size, number_of_bytes] += 1
        return func(*args, **(kwargs or {}))


def send(tensor: Tensor, axis: AxisGroup, *, to: int) -> None:
    """To a neighbour on the axis; who receives it does not exist."""
    dist.send(tensor, axis.ranks[to], group=axis.process_group)
