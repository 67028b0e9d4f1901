"""Seconds of the kernels of one layer on one device: an additive roofline, never the bare peak.

    matrix product [m, k] x [k, n]:  kernel_s + 2 m k n / matrix_flops + bytes of the three matrices / operand_bandwidth
    pointwise kernel:                kernel_s + bytes / memory_bandwidth
    attention core:                  its FLOPs / attention_flops (fused: all that it computes, causal: the half)

With the bytes beside the FLOPs instead of the larger of both, a product's rate falls smoothly as a dimension shrinks,
as measured rates do; the numbers are measured (`cluster.rates`). Backward of a matrix product is two products of the
same size. Not here: collectives (`parallel.links`), the schedule (`parallel.timeline`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from conf.schema import ClusterConfig, Config, DType
from parallel.plan import ParallelPlan
from parallel.sizes import sizes
from parallel.software import Software
from parallel.states import StateBytes

FP32 = 4
FUSED_BACKWARD = 2.5  # scores are computed again: five products for forward's two (arXiv:2205.14135)
SCORE_PASSES = 6  # unfused: times that scores are read or written by scaling, mask, softmax and dropout
SCORE_PASSES_BACKWARD = 8
LOSS_BYTES = 10  # of one logit: read, exponentials in fp32 written and read
ALIGNMENT = 8  # 16-bit tensor cores want dimensions that are multiples of it


@dataclass(frozen=True)
class Rates:
    """Of one device, all measured; units in `conf.schema.RatesConfig`."""

    matrix_flops: float
    operand_bandwidth: float
    attention_flops: float
    memory_bandwidth: float
    kernel_s: float
    micro_batch_s: float
    step_s: float
    overlap: float

    @classmethod
    def from_config(cls, cluster: ClusterConfig, dtype: DType) -> Rates:
        """Raises ValueError where one is not known, or in a format of another width, or in fp16 for bf16."""
        measured = cluster.rates.dtype
        other_width = measured is not None and StateBytes.of(measured) != StateBytes.of(dtype)
        if measured is not None and (other_width or (measured is DType.fp16 and dtype is DType.bf16)):
            raise ValueError(
                f"cluster.rates of cluster={cluster.name} are those of {measured.value}, not of precision.dtype="
                f"{dtype.value}; use precision={measured.value}, or measure them with recipes/probe.py"
            )
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if getattr(cluster.rates, name) is None]
        if missing:
            raise ValueError(
                f"cluster.rates of cluster={cluster.name} has no {', '.join(missing)}; measure them with "
                "recipes/probe.py, or choose a cluster that has them"
            )
        return cls(**{name: float(getattr(cluster.rates, name)) for name in names})

    def matrix_s(self, m: float, k: float, n: float, *, element: int) -> float:
        """One product [m, k] x [k, n] of values of `element` bytes."""
        moved = element * (m * k + k * n + m * n)
        return self.kernel_s + 2 * m * k * n / self.matrix_flops + moved / self.operand_bandwidth

    def pointwise_s(self, number_of_bytes: float, *, kernels: int = 1) -> float:
        """Kernels that only read and write."""
        return kernels * self.kernel_s + number_of_bytes / self.memory_bandwidth


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one micro-batch through one layer on one tensor rank, communication excluded."""

    forward_s: float
    backward_s: float
    again_s: float = 0.0  # forward computed a second time in backward
    weight_gradients_s: float = 0.0  # of backward: what communication of the layer's backward can hide behind

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.again_s


def block_pass(config: Config, plan: ParallelPlan, rates: Rates, software: Software) -> PassSeconds:
    """One transformer block."""
    model, s, tp = config.model, sizes(config.model), plan.tensor_model_parallel_size
    tokens, element = _tokens(config, plan), StateBytes.of(config.precision.dtype)
    hidden, ffn = model.hidden_size, s.ffn_hidden_size / tp
    query = model.num_attention_heads * s.head_dim / tp
    key_value = max(1, s.num_key_value_heads / tp) * s.head_dim
    ups = 2 if s.parts.gated else 1
    products = (
        (hidden, query + 2 * key_value),
        (query, hidden),
        (hidden, ups * ffn),
        (ffn, hidden),
    )
    matrices = sum(rates.matrix_s(tokens, k, n, element=element) for k, n in products)
    core, core_backward = _attention(config, plan, rates, software)
    shards = tp if plan.sequence_parallel else 1
    # Two norms (read, write), two residual sums (read, read, write); the activation; rotation or bias of q, k, v, and
    # where heads are normed two passes more.
    heads = (query + 2 * key_value) * (4 if s.parts.qk_norm else 2)
    moved = element * tokens * (10 * hidden / shards + (ups + 1) * ffn + heads)
    pointwise = rates.pointwise_s(moved, kernels=8)
    forward = matrices + core + pointwise
    again = {"none": 0.0, "selective": core, "full": forward}[plan.recompute]
    return PassSeconds(forward, 2 * matrices + core_backward + 2 * pointwise, again, matrices)


def _attention(config: Config, plan: ParallelPlan, rates: Rates, software: Software) -> tuple[float, float]:
    """Forward and backward seconds of scores, softmax and weighted values."""
    model, s = config.model, sizes(config.model)
    tokens, length = _tokens(config, plan), config.data.sequence_length
    heads = model.num_attention_heads / plan.tensor_model_parallel_size
    flops = 4 * tokens * length * heads * s.head_dim
    if software.fused_attention:
        core = rates.kernel_s + (flops / 2 if s.parts.causal else flops) / rates.attention_flops
        return core, FUSED_BACKWARD * core
    slow = software.unaligned_slowdown if s.head_dim % ALIGNMENT else 1.0
    products = 2 * rates.kernel_s + slow * flops / rates.attention_flops
    scores = tokens * length * heads * StateBytes.of(config.precision.dtype)
    return (
        products + SCORE_PASSES * scores / rates.memory_bandwidth,
        2 * products + SCORE_PASSES_BACKWARD * scores / rates.memory_bandwidth,
    )


def embedding_pass(config: Config, plan: ParallelPlan, rates: Rates) -> PassSeconds:
    """The look-up reads and writes one hidden vector a token; backward adds it to the table's gradient. A norm reads
    and writes one more."""
    vectors = 5 if sizes(config.model).parts.post_norm else 3
    moved = vectors * _tokens(config, plan) * config.model.hidden_size * StateBytes.of(config.precision.dtype)
    once = rates.pointwise_s(moved)
    return PassSeconds(once, 2 * once)


def head_pass(config: Config, plan: ParallelPlan, rates: Rates) -> PassSeconds:
    """Final norm, logits [B, S, V/T] and loss; BERT's transform, whole on each tensor rank."""
    tokens, element = _tokens(config, plan), StateBytes.of(config.precision.dtype)
    vocab = plan.padded_vocab_size / plan.tensor_model_parallel_size
    product = rates.matrix_s(tokens, config.model.hidden_size, vocab, element=element)
    loss = rates.pointwise_s(LOSS_BYTES * tokens * vocab, kernels=4)
    if not sizes(config.model).parts.head_transform:
        return PassSeconds(product + loss, 2 * product, 0.0, product)
    hidden = config.model.hidden_size
    share = tokens / (plan.tensor_model_parallel_size if plan.sequence_parallel else 1)
    dense = rates.matrix_s(share, hidden, hidden, element=element)
    pointwise = rates.pointwise_s(4 * share * hidden * element, kernels=2)  # activation and norm: read, write
    matrices = product + dense
    return PassSeconds(matrices + loss + pointwise, 2 * matrices + 2 * pointwise, 0.0, matrices)


def optimizer_s(parameters: float, config: Config, plan: ParallelPlan, rates: Rates) -> float:
    """AdamW on one rank's share: reads weight, gradient and two moments, writes three, and 16-bit weights; the gradient
    norm reads every gradient before. Offloaded: over the host's link instead.
    """
    dp = plan.data_parallel_size
    share = parameters / (dp if plan.zero_stage >= 1 else 1)
    copy = 0 if StateBytes.of(config.precision.dtype) == FP32 else StateBytes.of(config.precision.dtype)
    moved = share * (7 * FP32 + copy)
    if config.zero.offload_optimizer:
        host = config.cluster.host.bandwidth
        if host is None:
            raise ValueError(
                f"cluster.host of cluster={config.cluster.name} has no bandwidth, which zero.offload_optimizer=true "
                "needs; measure it with recipes/probe.py"
            )
        return moved / host
    held = parameters / (dp if plan.zero_stage >= 2 else 1)
    return rates.pointwise_s(moved + held * StateBytes.of(config.precision.grad_accum_dtype))


def _tokens(config: Config, plan: ParallelPlan) -> int:
    return plan.micro_batch_size * config.data.sequence_length
