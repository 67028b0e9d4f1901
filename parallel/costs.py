"""What each pipeline stage costs, in FLOPs and bytes, as `parallel.stages` weighs it.

A first measure good enough to cut the model by; the ledger of a finished plan is `parallel.memory`.
"""

from __future__ import annotations

from conf.schema import Config, DType
from parallel.activations import block_activation_bytes
from parallel.flops import block_flops_per_token, head_flops_per_token
from parallel.sizes import block_parameters, embedding_parameters, final_norm_parameters, head_parameters
from parallel.stages import Load

BYTES = {DType.fp32: 4, DType.bf16: 2, DType.fp16: 2}


def state_bytes_per_parameter(config: Config, *, dp: int) -> float:
    """Weights, gradients, master weights and both Adam moments of one parameter on one device (arXiv:1910.02054).

    ZeRO 1 spreads master weights and moments over dp ranks, 2 the gradients too, 3 the weights too. fp32 has no separate
    master weights.
    """
    dtype, accumulate = config.precision.dtype, config.precision.grad_accum_dtype
    stage = config.zero.stage
    weights = BYTES[dtype] / (dp if stage >= 3 else 1)
    gradients = BYTES[accumulate] / (dp if stage >= 2 else 1)
    states = 8 if dtype is DType.fp32 else 12
    on_host = config.zero.offload_optimizer
    return weights + gradients + (0 if on_host else states / (dp if stage >= 1 else 1))


def in_flight(stage: int, *, pp: int, num_micro_batches: int) -> int:
    """Micro-batches whose activations 1F1B holds at once on a stage: min(P - stage, M) (arXiv:2104.04473)."""
    return min(pp - stage, num_micro_batches)


def stage_loads(config: Config, *, dp: int, num_micro_batches: int) -> list[Load]:
    """Load of each pipeline rank, first to last; dualpipev: both of its stages together, the head on rank 0."""
    model, tp, pp = config.model, config.parallel.tp, config.parallel.pp
    tokens = config.train.micro_batch_size * config.data.sequence_length
    per_parameter = state_bytes_per_parameter(config, dp=dp)
    block_flops = tokens * block_flops_per_token(model, config.data.sequence_length)
    dual = config.parallel.schedule.value == "dualpipev"
    first, last = 0, 0 if dual else pp - 1
    loads = []
    for stage in range(pp):
        flops, parameters = 0, 0
        if stage == first:
            parameters += embedding_parameters(model, tp=tp).total
        if stage == last:
            flops += tokens * head_flops_per_token(model)
            parameters += final_norm_parameters(model).total
            if not (model.tie_word_embeddings and stage == first):
                parameters += head_parameters(model, tp=tp).total
        held = min(2 * pp, num_micro_batches) if dual else in_flight(stage, pp=pp, num_micro_batches=num_micro_batches)
        activations = held * block_activation_bytes(config)
        block_bytes = round(block_parameters(model, tp=tp).total * per_parameter) + activations
        loads.append(Load(flops, block_flops, round(parameters * per_parameter), block_bytes))
    return loads
