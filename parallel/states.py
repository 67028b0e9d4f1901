"""Bytes of training states, micro-batches in flight, and the loads that stages are balanced by.

State bytes follow arXiv:1910.02054 (mixed precision: 2 + 4 + 12 with fp32 accumulation) and what DeepSpeed 0.19 holds:
any ZeRO stage keeps a master copy of its partition, also where weights are fp32 already; bf16 under the pipeline engine
spreads it even at stage 0; and where gradients are accumulated in another type than the weights', those of the last
micro-batch stay beside the sums until the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from conf.schema import Config, DType, ModelConfig
from parallel import activations
from parallel.flops import block_flops_per_token, head_flops_per_token
from parallel.sizes import before_head_parameters, block_parameters, embedding_parameters, head_parameters, sizes
from parallel.stages import Load

FP32 = 4


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter on one rank. `low_precision_gradients`: beside `gradients`, the sums; no part of `total`."""

    weights: float
    gradients: float
    master_weights: float
    moments: float
    low_precision_gradients: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.master_weights + self.moments

    @staticmethod
    def of(dtype: DType) -> int:
        """Bytes of one value."""
        return 4 if dtype is DType.fp32 else 2


def uses_bf16_optimizer(config: Config) -> bool:
    """DeepSpeed's BF16_Optimizer: flat fp32 or bf16 gradient sums, states spread over the data axis at stage 0 too."""
    precision, stage = config.precision, config.zero.stage
    if precision.dtype is not DType.bf16 or config.zero.offload_optimizer:
        return False
    return precision.grad_accum_dtype is (DType.bf16, DType.fp32)[stage] if stage <= 1 else False


def state_bytes(config: Config, *, dp: int) -> StateBytes:
    """ZeRO 1 spreads master weights and moments over dp ranks, 2 gradients too, 3 weights too."""
    stage, precision = config.zero.stage, config.precision
    has_master = precision.dtype is not DType.fp32 or stage >= 1
    bf16_optimizer = uses_bf16_optimizer(config)
    spread = dp if stage >= 1 or bf16_optimizer else 1
    two_kinds = stage <= 1 and precision.grad_accum_dtype is not precision.dtype
    return StateBytes(
        weights=StateBytes.of(precision.dtype) / (dp if stage >= 3 else 1),
        gradients=StateBytes.of(precision.grad_accum_dtype) / (dp if stage >= 2 else 1),
        master_weights=(FP32 if has_master else 0) / spread,
        moments=2 * FP32 / spread,
        low_precision_gradients=StateBytes.of(precision.dtype) if two_kinds or bf16_optimizer else 0,
    )


@dataclass(frozen=True)
class Tensors:
    """Values of each parameter on one tensor rank, in order: `matrices` decay, `vectors` (norms, biases) do not."""

    matrices: tuple[int, ...] = ()
    vectors: tuple[int, ...] = ()

    def __add__(self, other: Tensors) -> Tensors:
        return Tensors(self.matrices + other.matrices, self.vectors + other.vectors)

    def times(self, count: int) -> Tensors:
        return Tensors(self.matrices * count, self.vectors * count)

    @property
    def total(self) -> int:
        return sum(self.matrices) + sum(self.vectors)


def block_tensors(model: ModelConfig, *, tp: int) -> Tensors:
    """Of one block: QKV as one matrix, or two where ranks share a key-value head."""
    z, hidden = sizes(model), model.hidden_size
    parts = z.parts
    query = model.num_attention_heads * z.head_dim // tp
    key_value = 2 * max(1, z.num_key_value_heads // tp) * z.head_dim
    rows = (query + key_value,) if z.num_key_value_heads >= tp else (query, key_value)
    up, down = z.ffn_hidden_size * (2 if parts.gated else 1) // tp, z.ffn_hidden_size // tp
    norm = (hidden,) * z.norm_vectors
    attention = (*rows * parts.qkv_bias, *(z.head_dim,) * 2 * parts.qk_norm, *(hidden,) * parts.out_bias)
    matrices = (*(n * hidden for n in rows), query * hidden, up * hidden, down * hidden)
    return Tensors(matrices, (*norm, *attention, *norm, *(up, hidden) * parts.mlp_bias))


def end_tensors(model: ModelConfig, *, tp: int, padded_vocab_size: int, first: bool, last: bool) -> Tensors:
    """Of a stage's embedding, where it is `first`, and of its final norm (BERT: transform) and head, where `last`; a
    tied table once."""
    z, hidden, table = sizes(model), model.hidden_size, padded_vocab_size * model.hidden_size // tp
    norm = (hidden,) * z.norm_vectors
    found = Tensors()
    if first:
        rows = (0 if z.parts.rotary else model.max_position_embeddings, z.parts.token_types)
        tables = (table, *(n * hidden for n in rows if n))
        found += Tensors(tables, norm if z.parts.post_norm else ())
    if last:
        final = () if z.parts.post_norm else norm
        if z.parts.head_transform:  # the head's bias is the module's own, before its layers
            found += Tensors((hidden * hidden,), (padded_vocab_size // tp, *final, hidden, *norm))
        else:
            found += Tensors(vectors=final)
        if not (first and model.tie_word_embeddings):
            found += Tensors((table,))
    return found


def padded_groups(matrices: int, vectors: int, *, dp: int, one_group: bool) -> int:
    """Values after DeepSpeed flattened each optimizer group (`one_group`: all in one) to a multiple of 2 dp."""
    groups = (matrices + vectors,) if one_group else (matrices, vectors)
    return sum(-(-n // (2 * dp)) * 2 * dp for n in groups)


def touched(values: Sequence[int], *, dp: int) -> int:
    """Values of all parameters of a flattened group that reach into one data rank's partition, on the rank with most.

    ZeRO 2 keeps the gradient of a parameter that lies across a border whole, on both sides.
    """
    part = -(-sum(values) // (2 * dp)) * 2
    ends = list(accumulate(values))
    held = [0] * dp
    for n, end in zip(values, ends, strict=True):
        for rank in range((end - n) // part, (end - 1) // part + 1):
            held[rank] += n
    return max(held)


def split_each(tensors: Tensors, *, dp: int) -> int:
    """Values of a data rank's part where each parameter is split by itself (ZeRO 3)."""
    return sum(-(-n // dp) for n in (*tensors.matrices, *tensors.vectors))


def in_flight(stage: int, *, pp: int, num_micro_batches: int, schedule: str = "1f1b") -> int:
    """Micro-batches whose activations a pipeline rank holds at once.

    1F1B: P - stage (arXiv:2104.04473). Eager 1F1B: 2 (P - stage) - 1 (arXiv:2211.05322). dualpipev: 2 P + 1 halves (a
    rank's two stages, see `halves_in_flight`), so P + 1 on every rank. gpipe (arXiv:1811.06965, for comparison): all.
    Never more than there are.
    """
    held = {"1f1b": pp - stage, "eager1f1b": 2 * (pp - stage) - 1, "dualpipev": pp + 1, "gpipe": num_micro_batches}
    return min(held[schedule], num_micro_batches)


def halves_in_flight(stage: int, *, pp: int) -> tuple[int, int]:
    """dualpipev: micro-batches held of a rank's stage `stage`, and of its stage 2 P - 1 - `stage`, at the most."""
    return 2 * pp - stage, stage + 1


def interleaved_in_flight(stage: int, *, pp: int, num_micro_batches: int, chunks: int) -> float:
    """Of Megatron's interleaved 1F1B, in whole stages: 2 (P - stage - 1) + (v - 1) P + 1 chunks of 1 / v stage each.

    On the first stage P (1 + (P - 1) / (P v)) (arXiv:2205.05198 section 4.2.3). For comparison: no engine here runs it.
    """
    held = 2 * (pp - stage - 1) + (chunks - 1) * pp + 1
    return min(held, num_micro_batches * chunks) / chunks


def stage_loads(config: Config, *, dp: int, num_micro_batches: int, device: str) -> list[Load]:
    """Load of each pipeline rank, first to last; dualpipev: both of its stages together, the head on rank 0."""
    model, tp, pp = config.model, config.parallel.tp, config.parallel.pp
    schedule = config.parallel.schedule.value
    tokens = config.train.micro_batch_size * config.data.sequence_length
    states = state_bytes(config, dp=dp)
    per_parameter = states.weights + states.gradients
    if not config.zero.offload_optimizer:
        per_parameter = states.total
    block_flops = tokens * block_flops_per_token(model, config.data.sequence_length)
    block_states = block_parameters(model, tp=tp).total * per_parameter
    last = 0 if schedule == "dualpipev" else pp - 1
    loads = []
    for stage in range(pp):
        flops, parameters = 0, 0
        if stage == 0:
            parameters += embedding_parameters(model, tp=tp).total
        if stage == last:
            flops += tokens * head_flops_per_token(model)
            parameters += before_head_parameters(model, tp=tp).total
            if not (model.tie_word_embeddings and stage == 0):
                parameters += head_parameters(model, tp=tp).total
        held = in_flight(stage, pp=pp, num_micro_batches=num_micro_batches, schedule=schedule)
        kept = held * activations.blocks_bytes(config, 1, device=device)
        loads.append(Load(flops, block_flops, round(parameters * per_parameter), round(block_states + kept)))
    return loads
