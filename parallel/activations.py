"""Bytes of activations that one micro-batch leaves for backward on one rank, tensor by tensor and by kind of layer.

arXiv:2205.05198 adapted to the blocks of `model/`: attention is fused (no S x S scores are kept, but each head's
log-sum-exp), SwiGLU and GELU keep their inputs. For GPT-2 in 16 bit with dropout on a GPU the sum is the paper's
34 s b h a block, its 5 a s^2 b being what the fused kernel saves (`fused_attention=False` counts them). Where CPU
kernels keep more, that is counted. Not here: how many micro-batches are in flight and what the states weigh
(`parallel.memory`); the paper's own formulas (`parallel.activation_formulas`).

T tensor ranks: what lies inside the split layers is 1/T on each, the rest whole, or 1/T under sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from conf.schema import Activation, Config, DType
from parallel.architecture import positions_travel, windows
from parallel.sizes import sizes

FP32, INT64, BOOL = 4, 8, 1
QUERIES_PER_BLOCK = 64  # of the CPU's attention (model.blocked_attention)


class Kinds(NamedTuple):
    """Bytes by kind of layer. `block_inputs`: what full recomputation starts from; `context`: masks and rotary tables,
    which the blocks of a stage share."""

    attention: float = 0
    mlp: float = 0
    norms: float = 0
    dropout: float = 0
    block_inputs: float = 0
    embedding: float = 0
    context: float = 0
    head: float = 0
    loss: float = 0


@dataclass(frozen=True)
class MicroBatch:
    """What one micro-batch leaves on a rank; `block` with parallel.recompute=none, or selective's smaller one."""

    block: Kinds
    hidden: float  # one tensor [B, S, H] (sequence parallel: [B, S/T, H])
    embedding: float
    mask: float  # [B, 1, S, S] of packed documents and sliding windows
    rotary: float  # cosines and sines at given positions
    final_norm: float
    head: float
    loss: float
    logits: float  # and their gradient in 16 bit
    gradients: float  # of activations, alive at once in a block's backward
    tables: float  # cosines and sines, held once by a rank
    recompute_interval: int  # 0: not full

    def stage(self, num_blocks: int, first: bool, last: bool) -> Kinds:
        """Kept by a stage: so many blocks, the embedding where it is `first`, norm, head and loss where `last`."""
        norms = self.final_norm if last else 0
        ends = Kinds(
            embedding=self.embedding if first else 0,
            context=self.mask + self.rotary,
            head=self.head if last else 0,
            loss=self.loss if last else 0,
        )
        if self.recompute_interval:
            segments = -(-num_blocks // self.recompute_interval)
            return ends._replace(norms=norms, block_inputs=segments * self.hidden)
        block = self.block
        return ends._replace(
            attention=num_blocks * block.attention,
            mlp=num_blocks * block.mlp,
            norms=num_blocks * block.norms + norms,
            dropout=num_blocks * block.dropout,
        )

    def recomputed(self, num_blocks: int) -> float:
        """Built again in backward and alive once at a time: full recomputation's blocks of one interval."""
        return min(self.recompute_interval, num_blocks) * sum(self.block)


@dataclass(frozen=True)
class Setting:
    """What the bytes depend on, on one rank. `tokens`: of a micro-batch; `element`: bytes of a value."""

    tokens: int
    length: int
    element: int
    tp: int
    shards: int  # tp where activations between the split layers are sharded over the sequence, else 1
    cpu: bool

    @property
    def hidden_tokens(self) -> float:
        return self.tokens / self.shards

    @property
    def composite_norm(self) -> bool:
        """Whether RMSNorm is torch's composite of pointwise functions."""
        return self.cpu and self.element != FP32

    @property
    def mask_element(self) -> int:
        """Of a dropout mask: CUDA's fused kernel keeps a byte a value, the CPU's a factor."""
        return self.element if self.cpu else BOOL


def setting(config: Config, *, device: str) -> Setting:
    """`device`: "cpu" or "cuda"."""
    tp = config.parallel.tp
    return Setting(
        tokens=config.train.micro_batch_size * config.data.sequence_length,
        length=config.data.sequence_length,
        element=FP32 if config.precision.dtype is DType.fp32 else 2,
        tp=tp,
        shards=tp if config.parallel.sequence_parallel else 1,
        cpu=device == "cpu",
    )


def micro_batch(config: Config, *, padded_vocab_size: int, device: str, fused_attention: bool = True) -> MicroBatch:
    """Of the config's micro-batch; `fused_attention=False`: a stack that keeps scores, as the papers' did."""
    model, s, z = config.model, setting(config, device=device), sizes(config.model)
    hidden = s.hidden_tokens * model.hidden_size * s.element
    masks = s.hidden_tokens * model.hidden_size * s.mask_element if model.hidden_dropout else 0.0
    norm = norm_bytes(config, device=device)
    vocabulary = s.tokens * padded_vocab_size / s.tp
    # In forward: fp32 exponentials; a token's sum, label and two flags (model.tensor_parallel.cross_entropy).
    loss = vocabulary * FP32 + s.tokens * (2 * FP32 + INT64 + 2 * BOOL)
    copies = s.element + (0 if s.element == FP32 else s.element)  # the logits, and the gradient in 16 bit
    return MicroBatch(
        block=_block(config, s, norm, 2 * masks, fused_attention),
        hidden=hidden,
        embedding=_ids_bytes(config, s) + masks + (norm if z.parts.post_norm else 0.0),
        mask=_masks_bytes(config, s),
        rotary=s.tokens * z.rotary_dim * s.element if positions_travel(config) else 0.0,
        final_norm=0.0 if z.parts.head_transform else norm,
        head=hidden + _transform_bytes(config, hidden, norm),
        loss=loss,
        logits=vocabulary * copies,
        gradients=_gradients_bytes(config, s),
        tables=s.length * z.rotary_dim * s.element,
        recompute_interval=config.parallel.recompute_interval if config.parallel.recompute.value == "full" else 0,
    )


def _transform_bytes(config: Config, hidden: float, norm: float) -> float:
    """Of BERT's layer before the head: what the dense layer, the activation and the norms take."""
    parts = sizes(config.model).parts
    if not parts.head_transform:
        return 0.0
    activation = 0 if parts.activation is Activation.relu else hidden  # as in a block, see `_block`
    return hidden + activation + norm + (0 if parts.post_norm else norm)


def hidden_bytes(config: Config, *, device: str) -> float:
    """One tensor [B, S, H] (sequence parallel: [B, S/T, H]): a block's input, what travels between stages."""
    s = setting(config, device=device)
    return s.hidden_tokens * config.model.hidden_size * s.element


def norm_bytes(config: Config, *, device: str) -> float:
    """What a norm keeps: its input and one or two numbers a token, in fp32 (LayerNorm on a CPU: the input's type)."""
    s, hidden = setting(config, device=device), config.model.hidden_size
    if sizes(config.model).parts.layer_norm:  # mean and 1 / std
        return s.hidden_tokens * (hidden * s.element + 2 * (s.element if s.cpu else FP32))
    return s.hidden_tokens * _rms_norm_bytes(hidden, s)


def _rms_norm_bytes(width: int, s: Setting) -> int:
    """Of one row: the input and a number; torch's composite on a CPU in 16 bit: input and normed values in fp32."""
    return 2 * width * FP32 + FP32 if s.composite_norm else width * s.element + FP32


def block_bytes(config: Config, *, device: str) -> float:
    """Of one block that recomputes nothing, or with parallel.recompute=selective its attention core."""
    return sum(micro_batch(config, padded_vocab_size=0, device=device).block)


def blocks_bytes(config: Config, num_blocks: int, *, device: str) -> float:
    """Kept by so many blocks in a row; with parallel.recompute=full one input for each recompute_interval blocks."""
    kinds = micro_batch(config, padded_vocab_size=0, device=device).stage(num_blocks, False, False)
    return sum(kinds._replace(context=0))


def _block(config: Config, s: Setting, norm: float, dropout: float, fused_attention: bool) -> Kinds:
    model, z = config.model, sizes(config.model)
    hidden = s.hidden_tokens * model.hidden_size * s.element
    width = z.ffn_hidden_size / s.tp
    activation = width * (2 if z.parts.gated else 1)  # SwiGLU keeps gate and up
    if z.parts.activation is Activation.relu:
        activation = 0  # its output says where it was cut off, and the down projection keeps that
    return Kinds(
        attention=hidden + _attention_bytes(config, s, fused_attention),  # hidden: the input of QKV
        mlp=hidden + s.tokens * (activation + width) * s.element,
        norms=2 * norm - (hidden if z.parts.parallel_residual else 0),  # then both norms keep the block's input
        dropout=dropout,
    )


def _attention_bytes(config: Config, s: Setting, fused: bool) -> float:
    """Between the input of QKV and the output projection; selective recomputation keeps its two ends only."""
    model, z = config.model, sizes(config.model)
    heads = model.num_attention_heads / s.tp
    query = s.tokens * heads * z.head_dim * s.element
    key_value = s.tokens * max(1, z.num_key_value_heads // s.tp) * z.head_dim * s.element
    kept = query + 2 * key_value + query  # query, key, value; what the output projection takes
    if z.num_key_value_heads < s.tp:  # QKV's weight, joined from the queries' and this rank's copy of a key-value head
        kept += (model.num_attention_heads // s.tp + 2) * z.head_dim * model.hidden_size * s.element
    if config.parallel.recompute.value == "selective":
        return kept
    scores = s.tokens * s.length * heads
    if not fused:  # arXiv:2205.05198: softmax's output, its dropout mask, and what the product with v takes
        return kept + scores * (2 * s.element + BOOL if model.attention_dropout else s.element)
    if s.cpu and model.attention_dropout:
        return _head_norms_bytes(config, s) + _composite_attention_bytes(config, s)
    kept += _head_norms_bytes(config, s) + s.tokens * heads * FP32  # log-sum-exp
    if z.parts.rotary and heads > 1 and _output_lies_as_query(config, s):
        kept += query  # heads first, as rotation leaves the query; the copy with tokens first is kept too
    return kept


def _output_lies_as_query(config: Config, s: Setting) -> bool:
    """Flash attention's output does (torch._meta_registrations), on a CPU in 16 bit too. The memory-efficient kernel's,
    which CUDA takes under a mask unless key-value heads are shared, has tokens first; so has our own on a CPU."""
    if s.cpu:
        return s.element != FP32
    masked = positions_travel(config) or any(_windows(config, s))
    return not masked or sizes(config.model).num_key_value_heads < config.model.num_attention_heads


def _windows(config: Config, s: Setting) -> set[int | None]:
    """The different sliding windows of the model's blocks that hide something."""
    return {None} if config.model.sliding_window is None else set(windows(config.model, s.length))


def _head_norms_bytes(config: Config, s: Setting) -> float:
    """Of queries and keys before rotation; the norms' input is a part of QKV's output, which is kept whole."""
    model, z = config.model, sizes(config.model)
    if not z.parts.qk_norm:
        return 0.0
    heads, key_value = model.num_attention_heads / s.tp, max(1, z.num_key_value_heads // s.tp)
    rows = s.tokens * (heads + key_value)
    if s.composite_norm:
        return rows * _rms_norm_bytes(z.head_dim, s)
    return rows * FP32 + s.tokens * (heads + 2 * key_value) * z.head_dim * s.element


def _composite_attention_bytes(config: Config, s: Setting) -> float:
    """The CPU has no fused kernel with dropout: torch's composite computes in fp32, key-value heads repeated.

    It keeps query, key, value, softmax's output, the dropout factors and what the product with v takes.
    """
    z, heads = sizes(config.model), config.model.num_attention_heads / s.tp
    one = s.tokens * heads * z.head_dim
    values = (
        3 * one if s.element == FP32 and not z.parts.rotary and s.tokens == s.length else one
    )  # a view keeps all of QKV
    return (2 * one + values) * FP32 + 3 * s.tokens * s.length * heads * FP32 + one * s.element


def _ids_bytes(config: Config, s: Setting) -> float:
    """Token ids, on a split vocabulary also a flag each; the places in a learned table of positions."""
    kept = s.tokens * (INT64 + (BOOL if s.tp > 1 else 0))
    if sizes(config.model).parts.rotary:
        return kept
    return kept + (s.tokens if positions_travel(config) else s.length) * INT64


def _masks_bytes(config: Config, s: Setting) -> float:
    """What hides other documents and what lies before a sliding window, on each stage: one for each kind of window."""
    kinds = _windows(config, s)
    if not positions_travel(config) and kinds == {None}:
        return 0.0
    return sum(_mask_bytes(config, s, window) for window in kinds)


def _mask_bytes(config: Config, s: Setting, window: int | None) -> float:
    """[B, 1, S, S], of windows alone [1, 1, S, S]; the CPU's own attention keeps half (bidirectional: all), at most."""
    if s.cpu and config.model.attention_dropout and config.parallel.recompute.value == "none":
        return 0.0  # the composite adds it and lets go of it
    samples = s.tokens // s.length if positions_travel(config) else 1
    if not s.cpu or s.element != FP32 or config.model.attention_dropout:
        return samples * s.length**2 * s.element
    if not sizes(config.model).parts.causal:
        return samples * s.length**2 * FP32
    blocks = ((first, min(first + QUERIES_PER_BLOCK, s.length)) for first in range(0, s.length, QUERIES_PER_BLOCK))
    seen = s.length if window is None else window
    return samples * FP32 * sum((last - first) * min(last, last - first + seen - 1) for first, last in blocks)


def _gradients_bytes(config: Config, s: Setting) -> float:
    """Those around the feed-forward, the widest part."""
    z = sizes(config.model)
    width = z.ffn_hidden_size / s.tp * (3 if z.parts.gated else 2)
    return s.element * (s.tokens * width + 3 * s.hidden_tokens * config.model.hidden_size)
