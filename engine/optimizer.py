"""AdamW over two parameter groups: decayed matrices, and undecayed one-dimensional parameters whatever their names."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from conf.schema import OptimizerConfig


def parameter_groups(parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig) -> list[dict]:
    """Groups for a torch optimizer. Norm weights and biases (one dimension) go without decay unless configured.

    A parameter that occurs twice (tied embedding and head on one stage) is listed once. Empty groups are left out.
    """
    unique = list({id(p): p for p in parameters if p.requires_grad}.values())
    flat = [p for p in unique if len(_shape(p)) <= 1 and not config.decay_norms_and_biases]
    chosen = {id(p) for p in flat}
    rest = [p for p in unique if id(p) not in chosen]
    groups = [{"params": rest, "weight_decay": config.weight_decay}, {"params": flat, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(groups: list[dict], config: OptimizerConfig, *, lr: float) -> torch.optim.AdamW:
    """torch's AdamW with its fused kernel (CPU and CUDA)."""
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=config.epsilon, fused=True)


def _shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """The parameter's own shape, not that of a ZeRO-3 partition."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
