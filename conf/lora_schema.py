"""Knobs of low-rank adapters: part of `conf.schema`, which others import."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional


@dataclass
class LoraConfig:
    """Low-rank adapters (arXiv:2106.09685) beside frozen matrices, named and scaled as in Hugging Face PEFT."""

    rank: int = 0  # rank of each adapter; 0: none, all weights are trained
    alpha: float = 16.0  # an adapter's output is multiplied by alpha / rank
    dropout: float = 0.0  # dropout on an adapter's input
    target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"]
    )  # transformers' names (q_proj, c_attn, mlp.c_proj, ...); all-linear: every matrix of the blocks
    initialize_from: Optional[str] = None  # folder of a PEFT adapter to begin with; null: B is 0 and A is drawn
