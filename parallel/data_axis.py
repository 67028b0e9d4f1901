"""Collectives on the data axis, where gradients are summed and weights gathered, on one rank of a stage.

Call by call as DeepSpeed 0.19 makes them here (`Software.as_deepspeed`; tests count them on ranks):

    ZeRO 0, fp32      each parameter's gradient by itself (`engine.pipeline`)
    BF16_Optimizer    flat sums, sent in 16 bit; weights gathered an optimizer group at a time, also at stage 0
    ZeRO 1, 2         buckets of gradients in the run's dtype, all-reduced; weights gathered a group at a time
    ZeRO 3            each parameter padded to the axis; weights gathered in forward stay while they may, and
                      the bias of BERT's head until the step

Else as arXiv:1910.02054 has it, in buckets and, for ZeRO 3, by layers. Not here: the other axes
(`parallel.communication`).
"""

from __future__ import annotations

from conf.schema import Config
from parallel.collective import Collective
from parallel.memory import LIVE_PARAMETERS
from parallel.plan import ParallelPlan
from parallel.sizes import sizes
from parallel.software import Software
from parallel.stage_values import trained_parameters, trained_tensors
from parallel.states import StateBytes, Tensors, padded_groups, split_each, uses_bf16_optimizer

ALL_REDUCE_VALUES = 500_000_000  # that BF16_Optimizer sums in one call (MEMORY_OPT_ALLREDUCE_SIZE)


def of_micro_batch(config: Config, plan: ParallelPlan, pp_rank: int, software: Software) -> list[Collective]:
    """One micro-batch: ZeRO 2 reduces gradients each time, ZeRO 3 gathers weights too."""
    if plan.zero_stage < 2:
        return []
    if plan.zero_stage == 3:
        return _zero3(config, plan, pp_rank, software)
    parameters = trained_parameters(config, plan, pp_rank)
    operation = "reduce_scatter" if software.reduce_scatters else "all_reduce"
    number_of_bytes = parameters * StateBytes.of(config.precision.dtype)
    return [_call(plan, "gradients", "backward", operation, number_of_bytes, _buckets(config, parameters))]


def of_step(config: Config, plan: ParallelPlan, pp_rank: int, software: Software) -> list[Collective]:
    """Once a step: sums of gradients (ZeRO 0, 1), and the weights that each rank has stepped (ZeRO 1, 2)."""
    if plan.zero_stage == 3:
        kept = _kept_values(config, plan) * StateBytes.of(config.precision.dtype) if software.as_deepspeed else 0
        return [_call(plan, "weights", "step", "all_gather", kept, 1, hides=False)] if kept else []
    calls = []
    if plan.zero_stage <= 1:
        operation = "reduce_scatter" if plan.zero_stage == 1 and software.reduce_scatters else "all_reduce"
        number_of_bytes, pieces = _sums(config, plan, pp_rank, software)
        hides = software.hides_data
        calls.append(_call(plan, "gradients", "step", operation, number_of_bytes, pieces, hides=hides))
    gathered = [
        _call(plan, "weights", "step", "all_gather", number_of_bytes, pieces, hides=False)
        for number_of_bytes, pieces in _stepped(config, plan, pp_rank, software)
    ]
    return calls + gathered


def _sums(config: Config, plan: ParallelPlan, pp_rank: int, software: Software) -> tuple[int, int]:
    """(bytes, calls) in which ZeRO 0 and 1 sum gradients."""
    tensors, precision = trained_tensors(config, plan, pp_rank), config.precision
    dtype, accumulated = StateBytes.of(precision.dtype), StateBytes.of(precision.grad_accum_dtype)
    if not software.as_deepspeed:  # sums are sent in fp32 where they are kept so and whole
        whole = plan.zero_stage == 0 or uses_bf16_optimizer(config)
        return tensors.total * (accumulated if whole else dtype), _buckets(config, tensors.total)
    if uses_bf16_optimizer(config):
        values = sum(_padded_groups(config, plan, tensors))
        return values * dtype, -(-values // ALL_REDUCE_VALUES)
    if plan.zero_stage == 0:
        return tensors.total * dtype, len(tensors.matrices) + len(tensors.vectors)
    return tensors.total * dtype, _buckets(config, tensors.total)


def _stepped(config: Config, plan: ParallelPlan, pp_rank: int, software: Software) -> list[tuple[int, int]]:
    """(bytes, calls) in which weights are gathered after the step."""
    element, tensors = StateBytes.of(config.precision.dtype), trained_tensors(config, plan, pp_rank)
    if not software.as_deepspeed:
        return [(tensors.total * element, _buckets(config, tensors.total))] if plan.zero_stage else []
    if plan.zero_stage == 0 and not uses_bf16_optimizer(config):
        return []
    return [(values * element, 1) for values in _padded_groups(config, plan, tensors)]


def _padded_groups(config: Config, plan: ParallelPlan, tensors: Tensors) -> list[int]:
    """Values of each of the optimizer's groups."""
    groups = [sum(tensors.matrices), sum(tensors.vectors)]
    if config.optimizer.decay_norms_and_biases:
        groups = [sum(groups)]
    return [padded_groups(values, 0, dp=plan.data_parallel_size, one_group=True) for values in groups]


def _zero3(config: Config, plan: ParallelPlan, pp_rank: int, software: Software) -> list[Collective]:
    """DeepSpeed gathers ahead, a bucket at a time, as far as it may hold weights; those it holds at the turn stay."""
    dp, tensors = plan.data_parallel_size, trained_tensors(config, plan, pp_rank)
    element = StateBytes.of(config.precision.dtype)
    if software.as_deepspeed:
        values = split_each(tensors, dp=dp) * dp
        pieces = _buckets(config, values)
        again = max(0, values - LIVE_PARAMETERS)
        gathered = values - _kept_values(config, plan)
        pieces_again = _buckets(config, again)
    else:
        values = again = gathered = tensors.total
        layers = config.model.num_layers + 2  # of the one stage that ZeRO 3 goes with; the final norm with the head
        pieces = pieces_again = max(_buckets(config, values), layers)
    return [
        _call(plan, "gradients", "backward", "reduce_scatter", values * element, pieces),
        _call(plan, "weights", "forward", "all_gather", gathered * element, pieces),
        _call(plan, "weights", "backward", "all_gather", again * element, pieces_again),
    ]


def _kept_values(config: Config, plan: ParallelPlan) -> int:
    """Of the bias of BERT's head, padded: a module hands it on to another, so DeepSpeed gathers it by itself and lets
    it stay until the step."""
    if not sizes(config.model).parts.head_transform:
        return 0
    dp = plan.data_parallel_size
    return split_each(Tensors(vectors=(plan.padded_vocab_size // plan.tensor_model_parallel_size,)), dp=dp) * dp


def _buckets(config: Config, values: int) -> int:
    return -(-values // config.zero.bucket_size)


def _call(
    plan: ParallelPlan, what: str, phase: str, operation: str, number_of_bytes: int, pieces: int, *, hides: bool = True
) -> Collective:
    """In so many calls."""
    each = -(-number_of_bytes // max(1, pieces))
    return Collective("data", what, phase, operation, plan.data_parallel_size, each, pieces, hides)
