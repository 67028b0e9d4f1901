"""The communication ledger of a plan: every collective of one optimizer step, by axis, with bytes and calls.

Tensor axis: arXiv:1909.08053 (two all-reduces a block and pass) and arXiv:2205.05198 (all-gathers and reduce-scatters
under sequence parallelism); pipe: arXiv:2104.04473; data: `parallel.data_axis`. Counted for one rank of a pipeline
stage; ranks of a stage do alike. Not here: seconds (`parallel.links`), and numbers of a few bytes (gradient norm, count
of tokens).
"""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema import Config
from parallel import data_axis
from parallel.architecture import positions_travel
from parallel.collective import Collective, times
from parallel.plan import ParallelPlan
from parallel.sizes import sizes
from parallel.software import HERE, Software
from parallel.states import StateBytes

FP32, INT64 = 4, 8


def ledger(config: Config, plan: ParallelPlan, pp_rank: int, software: Software = HERE) -> list[Collective]:
    """Every collective of one step on each rank of a pipeline stage."""
    blocks, embedding, head = layers_held(config, plan, pp_rank)
    calls = [times(call, blocks) for call in of_block(config, plan)]
    calls += of_embedding(config, plan) if embedding else []
    calls += of_head(config, plan) if head else []
    calls += [*of_stage_ends(config, plan, pp_rank), *data_axis.of_micro_batch(config, plan, pp_rank, software)]
    calls = [times(call, plan.num_micro_batches) for call in calls]
    calls += of_step(config, plan, pp_rank, software)
    return [call for call in calls if call.group_size > 1 and call.calls]


def layers_held(config: Config, plan: ParallelPlan, pp_rank: int) -> tuple[int, bool, bool]:
    """(blocks, whether the embedding, whether final norm and head) on a pipeline rank."""
    spans = [plan.stage_layers[stage] for stage in plan.stages_of(pp_rank)]
    last = config.model.num_layers + 2
    blocks = sum(min(end, last - 1) - max(first, 1) for first, end in spans)
    return blocks, any(first == 0 for first, _ in spans), any(end == last + 1 for _, end in spans)


def of_block(config: Config, plan: ParallelPlan) -> list[Collective]:
    """Tensor axis, one block and micro-batch."""
    model, s, tp = config.model, sizes(config.model), plan.tensor_model_parallel_size
    hidden, weight = _hidden_bytes(config, plan), model.hidden_size * StateBytes.of(config.precision.dtype)
    calls = []

    def add(what: str, phase: str, operation: str, number_of_bytes: int, count: int = 2, hides: bool = False) -> None:
        calls.append(Collective("tensor", what, phase, operation, tp, number_of_bytes, count, hides))

    for phase in ("forward", "again") if plan.recompute == "full" else ("forward",):
        if plan.sequence_parallel:
            add("blocks", phase, "all_gather", hidden)
            add("blocks", phase, "reduce_scatter", hidden)
        else:
            add("blocks", phase, "all_reduce", hidden)
    if plan.sequence_parallel:
        add("blocks, inputs again", "backward", "all_gather", hidden, hides=True)
        add("blocks", "backward", "all_gather", hidden)
        add("blocks", "backward", "reduce_scatter", hidden, hides=True)
        add("norm weights", "backward", "all_reduce", weight, 2 * s.norm_vectors)
    else:
        add("blocks", "backward", "all_reduce", hidden, hides=True)
    if s.parts.qk_norm:  # each rank norms its own heads
        add("query and key norms", "backward", "all_reduce", weight // model.hidden_size * s.head_dim)
    if s.num_key_value_heads < tp:  # ranks with a copy of a key-value head sum its gradient (model.tensor_parallel.qkv)
        vectors = 2 * s.num_key_value_heads * s.head_dim
        add("copied key-value weights", "backward", "all_reduce", vectors * weight, 1)
        if s.parts.qkv_bias:
            add("copied key-value biases", "backward", "all_reduce", vectors * weight // model.hidden_size, 1)
    return calls


def of_embedding(config: Config, plan: ParallelPlan) -> list[Collective]:
    """Tensor axis, the embedding, one micro-batch."""
    tp, hidden = plan.tensor_model_parallel_size, _hidden_bytes(config, plan)
    if not plan.sequence_parallel:
        return [Collective("tensor", "embedding", "forward", "all_reduce", tp, hidden, 1)]
    calls = [
        Collective("tensor", "embedding", "forward", "reduce_scatter", tp, hidden, 1),
        Collective("tensor", "embedding", "backward", "all_gather", tp, hidden, 1),
    ]
    size = sizes(config.model)
    if size.parts.post_norm:
        weight = config.model.hidden_size * StateBytes.of(config.precision.dtype)
        calls.append(Collective("tensor", "embedding norm", "backward", "all_reduce", tp, weight, size.norm_vectors))
    return calls


def of_head(config: Config, plan: ParallelPlan) -> list[Collective]:
    """Tensor axis, final norm (BERT: transform, whose bias and norm count with it), head and loss, one micro-batch."""
    model, tp, hidden = config.model, plan.tensor_model_parallel_size, _hidden_bytes(config, plan)
    tokens = plan.micro_batch_size * config.data.sequence_length
    loss = [
        Collective("tensor", "loss, largest logits", "forward", "all_reduce", tp, tokens * FP32, 1),
        Collective("tensor", "loss, sums", "forward", "all_reduce", tp, 2 * tokens * FP32, 1),
    ]
    if not plan.sequence_parallel:
        return [*loss, Collective("tensor", "head", "backward", "all_reduce", tp, hidden, 1, hides=True)]
    size, weight = sizes(model), model.hidden_size * StateBytes.of(config.precision.dtype)
    vectors, transform = 0 if size.parts.post_norm else size.norm_vectors, []
    if size.parts.head_transform:  # replicated, on each rank's share of the tokens
        vectors += 1 + size.norm_vectors
        number_of_bytes = model.hidden_size * weight
        transform = [Collective("tensor", "transform", "backward", "all_reduce", tp, number_of_bytes, 1)]
    return [
        Collective("tensor", "head", "forward", "all_gather", tp, hidden, 1),
        *loss,
        Collective("tensor", "head, input again", "backward", "all_gather", tp, hidden, 1, hides=True),
        Collective("tensor", "head", "backward", "reduce_scatter", tp, hidden, 1, hides=True),
        *transform,
        Collective("tensor", "final norm", "backward", "all_reduce", tp, weight, vectors),
    ]


def of_stage_ends(config: Config, plan: ParallelPlan, pp_rank: int) -> Iterator[Collective]:
    """Pipe axis, one micro-batch: activations on, gradients back, counted where they leave."""
    pp = plan.pipeline_model_parallel_size
    last = len(plan.stage_layers) - 1
    turn = pp - 1 if plan.schedule == "dualpipev" else last  # the V's stages pp - 1 and pp lie on one rank
    for stage in plan.stages_of(pp_rank):
        if stage not in (last, turn):
            sent = sent_bytes(config, plan) + _position_bytes(config, plan)
            yield Collective("pipe", "activations", "forward", "send_recv", pp, sent, 1)
        if stage > 0 and stage - 1 != turn:
            yield Collective("pipe", "gradients", "backward", "send_recv", pp, sent_bytes(config, plan), 1)


def of_step(config: Config, plan: ParallelPlan, pp_rank: int, software: Software) -> list[Collective]:
    """Once a step: the data axis, and the gradient of a word table that first and last stage share."""
    calls, pp = data_axis.of_step(config, plan, pp_rank, software), plan.pipeline_model_parallel_size
    if config.model.tie_word_embeddings and plan.schedule != "dualpipev" and pp > 1 and pp_rank in (0, pp - 1):
        table = plan.padded_vocab_size * config.model.hidden_size // plan.tensor_model_parallel_size
        number_of_bytes = table * StateBytes.of(config.precision.grad_accum_dtype)
        calls.append(Collective("pipe", "tied table's gradient", "step", "all_reduce", 2, number_of_bytes, 1))
    return calls


def sent_bytes(config: Config, plan: ParallelPlan) -> int:
    """What one tensor rank sends to the next stage: hidden [B, S, H], under sequence parallelism [B, S/T, H]."""
    return _hidden_bytes(config, plan) // (plan.tensor_model_parallel_size if plan.sequence_parallel else 1)


def _hidden_bytes(config: Config, plan: ParallelPlan) -> int:
    tokens = plan.micro_batch_size * config.data.sequence_length
    return tokens * config.model.hidden_size * StateBytes.of(config.precision.dtype)


def _position_bytes(config: Config, plan: ParallelPlan) -> int:
    """Positions inside documents travel with the activations, where stages need them."""
    return plan.micro_batch_size * config.data.sequence_length * INT64 if positions_travel(config) else 0
