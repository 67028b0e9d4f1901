"""The communication ledger of a plan: every collective of one optimizer step, by axis, with bytes and calls.

Tensor axis: arXiv:1909.08053 (two all-reduces a block and pass) and arXiv:2205.05198 (all-gathers and reduce-scatters
under sequence parallelism); pipe: arXiv:2104.04473; data: arXiv:1910.02054 as DeepSpeed 0.19 does it. Counted for one
rank of a pipeline stage; ranks of a stage do alike. Not here: seconds (`parallel.links`), and numbers of a few bytes
(gradient norm, count of tokens).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from conf.schema import Config
from parallel.memory import stage_parameters
from parallel.plan import ParallelPlan
from parallel.sizes import sizes
from parallel.states import StateBytes

FP32, INT64 = 4, 8


@dataclass(frozen=True)
class Collective:
    """`bytes`: of the whole tensor in one call (all_gather: what is gathered; reduce_scatter: what is reduced).

    `calls`: by one rank in one step. `hides`: may run beside computation that does not need it.
    """

    axis: str  # tensor, pipe or data
    what: str
    phase: str  # forward, backward (of a micro-batch, recomputation included) or step (once a step)
    operation: str  # all_reduce, all_gather, reduce_scatter or send_recv
    group_size: int
    bytes: int
    calls: int
    hides: bool = False

    @property
    def total_bytes(self) -> int:
        return self.bytes * self.calls


def ledger(config: Config, plan: ParallelPlan, pp_rank: int) -> list[Collective]:
    """Every collective of one step on each rank of a pipeline stage."""
    calls = [*_tensor(config, plan, pp_rank), *_pipe(config, plan, pp_rank), *_data(config, plan, pp_rank)]
    return [call for call in calls if call.group_size > 1 and call.calls]


def _tensor(config: Config, plan: ParallelPlan, pp_rank: int) -> Iterator[Collective]:
    """Of the layers: hidden [B, S, H] in the run's dtype, loss numbers in fp32."""
    model, tp, count = config.model, plan.tensor_model_parallel_size, plan.num_micro_batches
    tokens = plan.micro_batch_size * config.data.sequence_length
    hidden = tokens * model.hidden_size * StateBytes.of(config.precision.dtype)
    layers = [layer for stage in plan.stages_of(pp_rank) for layer in range(*plan.stage_layers[stage])]
    last = model.num_layers + 2
    blocks = sum(0 < layer < last - 1 for layer in layers)

    def each(what: str, phase: str, operation: str, number_of_bytes: int, per: int, hides: bool = False) -> Collective:
        return Collective("tensor", what, phase, operation, tp, number_of_bytes, per * count, hides)

    copied = sizes(model).num_key_value_heads
    if copied < tp:  # ranks with a copy of the same key-value head sum its gradient (model.tensor_parallel.qkv)
        vectors = 2 * copied * sizes(model).head_dim * StateBytes.of(config.precision.dtype)
        yield each("copied key-value weights", "backward", "all_reduce", vectors * model.hidden_size, blocks)
        if sizes(model).has_bias:
            yield each("copied key-value biases", "backward", "all_reduce", vectors, blocks)
    again = 1 if plan.recompute == "full" else 0
    if not plan.sequence_parallel:
        yield each("blocks", "forward", "all_reduce", hidden, 2 * blocks)
        yield each("blocks, recomputed", "backward", "all_reduce", hidden, 2 * blocks * again)
        yield each("blocks", "backward", "all_reduce", hidden, 2 * blocks, hides=True)
    else:
        norms = sizes(model).norm_vectors
        weight = model.hidden_size * StateBytes.of(config.precision.dtype)
        for phase, times, what in (("forward", 1, "blocks"), ("backward", again, "blocks, recomputed")):
            yield each(what, phase, "all_gather", hidden, 2 * blocks * times)
            yield each(what, phase, "reduce_scatter", hidden, 2 * blocks * times)
        yield each("blocks, inputs again", "backward", "all_gather", hidden, 2 * blocks, hides=True)
        yield each("blocks", "backward", "all_gather", hidden, 2 * blocks)
        yield each("blocks", "backward", "reduce_scatter", hidden, 2 * blocks, hides=True)
        yield each("norm weights", "backward", "all_reduce", weight, norms * (2 * blocks + (last in layers)))
    if 0 in layers:
        yield each("embedding", "forward", "reduce_scatter" if plan.sequence_parallel else "all_reduce", hidden, 1)
        if plan.sequence_parallel:
            yield each("embedding", "backward", "all_gather", hidden, 1)
    if last in layers:
        if plan.sequence_parallel:
            yield each("head", "forward", "all_gather", hidden, 1)
            yield each("head, input again", "backward", "all_gather", hidden, 1, hides=True)
        operation = "reduce_scatter" if plan.sequence_parallel else "all_reduce"
        yield each("head", "backward", operation, hidden, 1, hides=True)
        yield each("loss, largest logits", "forward", "all_reduce", tokens * FP32, 1)
        yield each("loss, sums", "forward", "all_reduce", 2 * tokens * FP32, 1)


def _pipe(config: Config, plan: ParallelPlan, pp_rank: int) -> Iterator[Collective]:
    """Activations on, gradients back; each send is counted where it leaves. Document positions travel with them."""
    pp, count = plan.pipeline_model_parallel_size, plan.num_micro_batches
    tokens = plan.micro_batch_size * config.data.sequence_length
    shards = plan.tensor_model_parallel_size if plan.sequence_parallel else 1
    hidden = tokens * config.model.hidden_size * StateBytes.of(config.precision.dtype) // shards
    positions = tokens * INT64 if config.data.mask_documents else 0
    last = len(plan.stage_layers) - 1
    # The V's turn (stages pp - 1 and pp) lies on one rank.
    turn = pp - 1 if plan.schedule == "dualpipev" else last
    for stage in plan.stages_of(pp_rank):
        if stage not in (last, turn):
            yield Collective("pipe", "activations", "forward", "send_recv", pp, hidden + positions, count)
        if stage > 0 and stage - 1 != turn:
            yield Collective("pipe", "gradients", "backward", "send_recv", pp, hidden, count)


def _data(config: Config, plan: ParallelPlan, pp_rank: int) -> Iterator[Collective]:
    """Gradients summed and, with ZeRO, weights gathered; ZeRO 2 and 3 reduce at each micro-batch."""
    model, dp, stage = config.model, plan.data_parallel_size, plan.zero_stage
    parameters = stage_parameters(config, plan, pp_rank)
    weights = parameters * StateBytes.of(config.precision.dtype)
    gradients = parameters * StateBytes.of(config.precision.grad_accum_dtype)
    count = plan.num_micro_batches
    if stage == 0:
        yield Collective("data", "gradients", "step", "all_reduce", dp, gradients, 1)
    elif stage == 1:
        yield Collective("data", "gradients", "step", "reduce_scatter", dp, gradients, 1)
        yield Collective("data", "weights", "step", "all_gather", dp, weights, 1)
    else:
        yield Collective("data", "gradients", "backward", "reduce_scatter", dp, gradients, count, hides=True)
        if stage == 2:
            yield Collective("data", "weights", "step", "all_gather", dp, weights, 1)
        else:
            yield Collective("data", "weights", "forward", "all_gather", dp, weights, count, hides=True)
            yield Collective("data", "weights again", "backward", "all_gather", dp, weights, count, hides=True)
    pp = plan.pipeline_model_parallel_size
    if model.tie_word_embeddings and pp > 1 and plan.schedule != "dualpipev" and pp_rank in (0, pp - 1):
        table = plan.padded_vocab_size * model.hidden_size // plan.tensor_model_parallel_size
        number_of_bytes = table * StateBytes.of(config.precision.grad_accum_dtype)
        yield Collective("pipe", "tied table's gradient", "step", "all_reduce", 2, number_of_bytes, 1)
