"""What the planner must know of the program that runs a plan. This repository's is the default; others are those of
published runs (`parallel.published`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Software:
    """Traits that change what is computed or sent, not how fast a device is."""

    fused_attention: bool = True
    as_deepspeed: bool = True  # the data axis call by call as DeepSpeed 0.19 has it, not as papers do
    partitioned_sends: bool = False  # each tensor rank sends its share between stages, and the shares are gathered
    reduce_scatters: bool = False  # ZeRO 1 and 2; DeepSpeed 0.19 all-reduces its buckets and keeps a part
    hides_data: bool = False  # gradients of ZeRO 0 and 1 are summed beside the last micro-batch's backward
    unaligned_slowdown: float = 1.0  # unfused attention: factor where head_dim is no multiple of 8


HERE = Software()
