"""The published formulas for activation memory, arXiv:2205.05198 table 2 and equations 5 and 6, as they stand.

Their convention: GPT blocks in 16 bit with dropout, attention unfused (5 a s / h of a block), statistics of norms, the
embedding, logits and pipeline buffers left out. Kept to compare with: what our own layers keep is
`parallel.activations`.
"""

from __future__ import annotations


def block_bytes(
    *,
    sequence: int,
    micro_batch: int,
    hidden: int,
    heads: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Table 2: bytes of one block. `recompute`: none, selective or full."""
    scores = 5 * heads * sequence / hidden if recompute == "none" else 0.0
    if recompute == "full":
        per_value = 2.0
    elif sequence_parallel:
        per_value = (34 + scores) / tp
    else:
        per_value = 10 + (24 + scores) / tp
    return sequence * micro_batch * hidden * per_value


def first_stage_bytes(block: float, *, layers: int, pp: int = 1, chunks: int = 1) -> float:
    """Section 4.2.3: the first stage of 1F1B holds as much as all layers; interleaved, (1 + (P - 1) / (P v)) of it."""
    return block * layers * (1 + (pp - 1) / (pp * chunks) if chunks > 1 else 1)


def first_stage_ends_bytes(*, sequence: int, micro_batch: int, hidden: int, tp: int, pp: int, vocabulary: int) -> float:
    """Section 4.3: the embedding's dropout masks of P micro-batches, and at pp = 1 the last norm, the head and fp32
    logits: s b h p / t, and 4 s b h / t (1 + v / h). With sequence parallelism."""
    tokens = sequence * micro_batch * hidden / tp
    return tokens * pp + (4 * tokens * (1 + vocabulary / hidden) if pp == 1 else 0)


def state_bytes(*, layers: int, hidden: int, tp: int, pp: int) -> float:
    """Figure 1's bars of parameters and optimizer states: the blocks' matrices, 12 l h^2, at 18 bytes a parameter."""
    return 12 * layers * hidden**2 * 18 / (tp * pp)
