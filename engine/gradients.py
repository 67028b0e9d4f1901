"""The true global gradient norm, for the mixes where DeepSpeed's own leaves parameters out (plain fp32 without
ZeRO).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed

from parallel.groups import AxisGroup


def counted_here(parameter: torch.nn.Parameter, tensor: AxisGroup) -> bool:
    """Whether this rank's copy stands for the parameter: shards everywhere, replicas and tied copies once."""
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return bool(getattr(parameter, "tensor_model_parallel", False)) or tensor.rank == 0


def global_norm(
    parameters: Iterable[torch.nn.Parameter], *, tensor: AxisGroup, model_group: torch.distributed.ProcessGroup | None
) -> torch.Tensor:
    """2-norm of all gradients of the model, [] float64, the same on every rank.

    model_group: the ranks that together hold one copy of the model (tensor x pipeline); None when that is one rank.
    """
    parameters = list(parameters)
    grads = [p.grad for p in parameters if p.grad is not None and counted_here(p, tensor)]
    if grads:
        squares = torch.stack(torch._foreach_norm(grads)).double().square().sum()
    else:
        squares = torch.zeros((), dtype=torch.float64, device=parameters[0].device if parameters else None)
    if model_group is not None:
        torch.distributed.all_reduce(squares, group=model_group)
    return squares.sqrt()


def clip_factor(norm: float, *, max_norm: float) -> float:
    """What gradients are multiplied with: max_norm / norm where the norm is larger, else 1. max_norm 0: no clipping."""
    return max_norm / norm if norm > max_norm > 0 else 1.0
