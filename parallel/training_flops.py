"""FLOPs of what a run trains: those of `parallel.flops` for all weights, fewer where most are frozen beside adapters.

A frozen matrix needs no gradient of its own, so of forward, backward to the input and backward to the weight two remain
(4 instead of 6 FLOPs a parameter and token); an adapter needs all three. What the lowest blocks need not send further
down is not subtracted: it is one matrix's share of a block.
"""

from __future__ import annotations

from conf.schema import Config
from parallel.adapters import block_adapters
from parallel.flops import (
    attention_core_flops_per_token,
    block_flops_per_token,
    hardware_flops_per_token,
    head_flops_per_token,
    model_flops_per_token,
)


def training_flops_per_token(config: Config) -> int:
    """Forward and backward FLOPs of one trained token, recomputation excluded (for MFU)."""
    return model_flops_per_token(config.model, config.data.sequence_length) - _saved(config)


def training_hardware_flops_per_token(config: Config, *, recompute: str) -> int:
    """The same with recomputation (for HFU)."""
    whole = hardware_flops_per_token(config.model, config.data.sequence_length, recompute=recompute)
    again = 0
    if recompute == "full" and config.lora.rank > 0:
        again = config.model.num_layers * 2 * block_adapters(config.model, config.lora, tp=1).total
    return whole - _saved(config) + again


def _saved(config: Config) -> int:
    """Weight gradients of frozen matrices that are not computed, less what adapters add."""
    if config.lora.rank == 0:
        return 0
    model, length = config.model, config.data.sequence_length
    matrices = block_flops_per_token(model, length) - attention_core_flops_per_token(model, length)
    adapters = 6 * block_adapters(model, config.lora, tp=1).total
    return model.num_layers * (matrices - adapters) + head_flops_per_token(model)
