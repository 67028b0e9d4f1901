"""Bytes of activations that one micro-batch leaves for backward on one rank, tensor by tensor.

arXiv:2205.05198 adapted to the blocks of `model/`: attention is fused (no S x S scores are kept, but each head's
log-sum-exp), SwiGLU and GELU keep their inputs. For GPT-2 in 16 bit with dropout on a GPU the sum is the paper's
34 s b h a block, its 5 a s^2 b being what the fused kernel saves. Where CPU kernels keep more, that is counted.
Not here: how many micro-batches are in flight and what the states weigh (`parallel.memory`).

T tensor ranks: what lies inside the split layers is 1/T on each, the rest whole, or 1/T under sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import Config, DType
from parallel.sizes import sizes

FP32 = 4


@dataclass(frozen=True)
class Setting:
    """What the bytes depend on, on one rank. `tokens`: of a micro-batch; `element`: bytes of a value."""

    tokens: int
    element: int
    tp: int
    shards: int  # tp where activations between the split layers are sharded over the sequence, else 1
    fused_norm: bool  # CPU has no fused RMSNorm for 16 bit
    mask_bytes: int  # of one element of a dropout mask

    @property
    def hidden_tokens(self) -> float:
        return self.tokens / self.shards


def setting(config: Config, *, device: str) -> Setting:
    """`device`: "cpu" or "cuda"."""
    element = FP32 if config.precision.dtype is DType.fp32 else 2
    tp = config.parallel.tp
    return Setting(
        tokens=config.train.micro_batch_size * config.data.sequence_length,
        element=element,
        tp=tp,
        shards=tp if config.parallel.sequence_parallel else 1,
        fused_norm=device != "cpu",
        mask_bytes=element if device == "cpu" else 1,
    )


def hidden_bytes(config: Config, *, device: str) -> float:
    """One tensor [B, S, H] (sequence parallel: [B, S/T, H]): a block's input, what travels between stages."""
    s = setting(config, device=device)
    return s.hidden_tokens * config.model.hidden_size * s.element


def norm_bytes(config: Config, *, device: str) -> float:
    """What a norm keeps: its input and one or two numbers a token in fp32."""
    s, hidden = setting(config, device=device), config.model.hidden_size
    if sizes(config.model).norm_vectors == 2:  # LayerNorm: mean and 1 / std
        return s.hidden_tokens * (hidden * s.element + 2 * FP32)
    if s.element == FP32 or s.fused_norm:
        return s.hidden_tokens * (hidden * s.element + FP32)
    return s.hidden_tokens * (2 * hidden * FP32 + FP32)  # torch's composite: the input and its normed values in fp32


def block_bytes(config: Config, *, device: str) -> float:
    """Of one block that recomputes nothing, or with parallel.recompute=selective its attention core."""
    model, s, z = config.model, setting(config, device=device), sizes(config.model)
    hidden = s.hidden_tokens * model.hidden_size * s.element
    heads = model.num_attention_heads / s.tp
    query = heads * z.head_dim
    key_value = max(1, z.num_key_value_heads // s.tp) * z.head_dim
    width = z.ffn_hidden_size / s.tp
    kept = {
        "norms": 2 * norm_bytes(config, device=device),
        "inputs of QKV and up projections": 2 * hidden,
        "query, key, value": s.tokens * (query + 2 * key_value) * s.element,
        "log-sum-exp of each head": s.tokens * heads * FP32,
        "input of the output projection": s.tokens * query * s.element,
        "input of the activation": s.tokens * width * (2 if z.gated else 1) * s.element,
        "input of the down projection": s.tokens * width * s.element,
        "masks of hidden dropout": 2 * s.hidden_tokens * model.hidden_size * s.mask_bytes
        if model.hidden_dropout
        else 0,
        "scores (CPU: no fused kernel with dropout)": 0.0,
    }
    if model.attention_dropout and device == "cpu":
        scores = s.tokens * config.data.sequence_length * heads
        kept["scores (CPU: no fused kernel with dropout)"] = 2 * scores * s.element + scores * s.mask_bytes
        kept["log-sum-exp of each head"] = 0
    if config.parallel.recompute.value == "selective":
        kept["log-sum-exp of each head"] = kept["scores (CPU: no fused kernel with dropout)"] = 0
    return sum(kept.values())


def blocks_bytes(config: Config, num_blocks: int, *, device: str) -> float:
    """Kept by so many blocks in a row; with parallel.recompute=full one input for each recompute_interval blocks."""
    if config.parallel.recompute.value != "full":
        return num_blocks * block_bytes(config, device=device)
    return -(-num_blocks // config.parallel.recompute_interval) * hidden_bytes(config, device=device)


def recomputed_bytes(config: Config, num_blocks: int, *, device: str) -> float:
    """Built again in backward and alive once at a time: full recomputation's blocks of one interval."""
    if config.parallel.recompute.value != "full":
        return 0.0
    return min(config.parallel.recompute_interval, num_blocks) * block_bytes(config, device=device)


def embedding_bytes(config: Config, *, device: str) -> float:
    """Token ids and positions as int64, and the dropout mask."""
    s, model = setting(config, device=device), config.model
    ids = s.tokens * 8 * (2 if config.data.mask_documents else 1)
    return ids + (s.hidden_tokens * model.hidden_size * s.mask_bytes if model.hidden_dropout else 0)


def mask_bytes(config: Config, *, device: str) -> float:
    """The [B, 1, S, S] mask that keeps packed documents apart: one a micro-batch and stage, shared by its blocks."""
    s = setting(config, device=device)
    return s.tokens * config.data.sequence_length * s.element if config.data.mask_documents else 0.0


def head_bytes(config: Config, *, device: str) -> float:
    """What the final norm keeps, and the head's input."""
    return norm_bytes(config, device=device) + hidden_bytes(config, device=device)


def logits_bytes(config: Config, *, padded_vocab_size: int, device: str) -> float:
    """Logits [B, S, V/T], the loss's exponentials in fp32 that become the gradient, and its 16-bit copy."""
    s = setting(config, device=device)
    per_value = s.element + FP32 + (0 if s.element == FP32 else s.element)
    return s.tokens * padded_vocab_size / s.tp * per_value


def workspace_bytes(config: Config, *, device: str) -> float:
    """Gradients of activations alive at once in a block's backward: those around the feed-forward, the widest part."""
    model, s, z = config.model, setting(config, device=device), sizes(config.model)
    width = z.ffn_hidden_size / s.tp * (3 if z.gated else 2)
    return s.element * (s.tokens * width + 3 * s.hidden_tokens * model.hidden_size)
