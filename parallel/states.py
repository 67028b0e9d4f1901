"""Bytes of training states per parameter, micro-batches in flight, and the loads that stages are balanced by.

State bytes follow arXiv:1910.02054 (mixed precision: 2 + 4 + 12 with fp32 accumulation) and what DeepSpeed 0.19 holds:
any ZeRO stage keeps a master copy of its partition, also where weights are fp32 already.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import Config, DType
from parallel import activations
from parallel.flops import block_flops_per_token, head_flops_per_token
from parallel.sizes import block_parameters, embedding_parameters, final_norm_parameters, head_parameters
from parallel.stages import Load


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter on one rank."""

    weights: float
    gradients: float
    master_weights: float
    moments: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.master_weights + self.moments

    @staticmethod
    def of(dtype: DType) -> int:
        """Bytes of one value."""
        return 4 if dtype is DType.fp32 else 2


def state_bytes(config: Config, *, dp: int) -> StateBytes:
    """ZeRO 1 spreads master weights and moments over dp ranks, 2 gradients too, 3 weights too."""
    stage, precision = config.zero.stage, config.precision
    has_master = precision.dtype is not DType.fp32 or stage >= 1
    spread = dp if stage >= 1 else 1
    return StateBytes(
        weights=StateBytes.of(precision.dtype) / (dp if stage >= 3 else 1),
        gradients=StateBytes.of(precision.grad_accum_dtype) / (dp if stage >= 2 else 1),
        master_weights=(4 if has_master else 0) / spread,
        moments=8 / spread,
    )


def in_flight(stage: int, *, pp: int, num_micro_batches: int, schedule: str = "1f1b") -> int:
    """Micro-batches whose activations a pipeline rank holds at once.

    1F1B: P - stage (arXiv:2104.04473). Eager 1F1B: 2 (P - stage) - 1 (arXiv:2211.05322). dualpipev: 2 P + 1 halves (a
    rank's two stages), so P + 1 on every rank. Never more than there are.
    """
    held = {"1f1b": pp - stage, "eager1f1b": 2 * (pp - stage) - 1, "dualpipev": pp + 1}
    return min(held[schedule], num_micro_batches)


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
            parameters += final_norm_parameters(model).total
            if not (model.tie_word_embeddings and stage == 0):
                parameters += head_parameters(model, tp=tp).total
        held = in_flight(stage, pp=pp, num_micro_batches=num_micro_batches, schedule=schedule)
        kept = held * activations.blocks_bytes(config, 1, device=device)
        loads.append(Load(flops, block_flops, round(parameters * per_parameter), round(block_states + kept)))
    return loads
