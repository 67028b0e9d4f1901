"""The memory ledger of a plan: predicted bytes on one rank of each pipeline stage, by category.

States follow arXiv:1910.02054 as DeepSpeed 0.19 really holds them (its ZeRO keeps a master copy of its partition in
fp32 training too); activations are `parallel.activations` times the micro-batches in flight. Tensor and data ranks of a
stage hold equal amounts. Not counted: the framework itself, allocator slack, communication libraries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conf.schema import Config, DType
from parallel import activations
from parallel.hardware import device_kind
from parallel.plan import ParallelPlan
from parallel.sizes import block_parameters, embedding_parameters, final_norm_parameters, head_parameters
from parallel.states import StateBytes, in_flight, state_bytes


@dataclass(frozen=True)
class Ledger:
    """Bytes on each rank of pipeline stage `pp_rank`. `host`: of offloaded states, not part of `total`."""

    pp_rank: int
    parameters: int  # values of this rank, padding rows included
    in_flight: int  # micro-batches whose activations are held at once
    weights: int
    gradients: int
    master_weights: int
    optimizer_moments: int
    activations: int  # of all micro-batches in flight
    logits: int  # logits and loss, last stage
    buffers: int  # pipeline sends and receives, gradient buckets
    workspace: int  # gradients of activations, blocks built again in backward
    host: int

    @property
    def states(self) -> int:
        """Weights, gradients and optimizer states: what is held from step to step."""
        return self.weights + self.gradients + self.master_weights + self.optimizer_moments

    @property
    def total(self) -> int:
        return self.states + self.activations + self.logits + self.buffers + self.workspace


def predict(config: Config, plan: ParallelPlan, *, device: str | None = None) -> list[Ledger]:
    """A ledger for each pipeline rank, first to last. `device`: "cpu", "cuda", or None for this machine's."""
    kind = device_kind() if device is None else device
    return [_ledger(config, plan, pp_rank, kind) for pp_rank in range(plan.pipeline_model_parallel_size)]


def worst(ledgers: Sequence[Ledger]) -> Ledger:
    """The ledger of the stage that needs most: it decides whether a plan fits."""
    return max(ledgers, key=lambda ledger: ledger.total)


def stage_parameters(config: Config, plan: ParallelPlan, pp_rank: int) -> int:
    """Values held by one rank of a stage: its shards and replicas, padded rows; a tied table once."""
    model, tp = config.model, plan.tensor_model_parallel_size
    layers = [layer for stage in plan.stages_of(pp_rank) for layer in range(*plan.stage_layers[stage])]
    last = model.num_layers + 2
    total = sum(block_parameters(model, tp=tp).total for layer in layers if 0 < layer < last - 1)
    if 0 in layers:
        total += embedding_parameters(model, tp=tp, vocab_size=plan.padded_vocab_size).total
    if last in layers:
        total += final_norm_parameters(model).total
        if not (model.tie_word_embeddings and 0 in layers):
            total += head_parameters(model, tp=tp, vocab_size=plan.padded_vocab_size).total
    return total


def _ledger(config: Config, plan: ParallelPlan, pp_rank: int, device: str) -> Ledger:
    layers = [layer for stage in plan.stages_of(pp_rank) for layer in range(*plan.stage_layers[stage])]
    last = config.model.num_layers + 2
    num_blocks = sum(0 < layer < last - 1 for layer in layers)
    parameters = stage_parameters(config, plan, pp_rank)
    states = state_bytes(config, dp=plan.data_parallel_size)
    held = in_flight(
        pp_rank,
        pp=plan.pipeline_model_parallel_size,
        num_micro_batches=plan.num_micro_batches,
        schedule=plan.schedule,
    )
    kept = activations.blocks_bytes(config, num_blocks, device=device) + activations.mask_bytes(config, device=device)
    kept += activations.embedding_bytes(config, device=device) if 0 in layers else 0
    kept += activations.head_bytes(config, device=device) if last in layers else 0
    logits = 0.0
    if last in layers:
        logits = activations.logits_bytes(config, padded_vocab_size=plan.padded_vocab_size, device=device)
    workspace = activations.workspace_bytes(config, device=device)
    workspace += activations.recomputed_bytes(config, num_blocks, device=device)
    offload = config.zero.offload_optimizer
    return Ledger(
        pp_rank=pp_rank,
        parameters=parameters,
        in_flight=held,
        weights=round(parameters * states.weights),
        gradients=round(parameters * states.gradients),
        master_weights=0 if offload else round(parameters * states.master_weights),
        optimizer_moments=0 if offload else round(parameters * states.moments),
        activations=round(held * kept),
        logits=round(logits),
        buffers=_pipeline_buffers(config, plan, held, device) + _bucket_bytes(config, plan),
        workspace=round(workspace),
        host=round(parameters * (states.master_weights + states.moments)) if offload else 0,
    )


def _pipeline_buffers(config: Config, plan: ParallelPlan, held: int, device: str) -> int:
    """What is sent on is kept until its backward; one received activation and one received gradient at a time."""
    if plan.pipeline_model_parallel_size == 1:
        return 0
    return round((held + 2) * activations.hidden_bytes(config, device=device))


def _bucket_bytes(config: Config, plan: ParallelPlan) -> int:
    """ZeRO's flat buffer for reducing gradients; two of them where communication overlaps (no pipeline, ZeRO 2 or 3).

    Its size is zero.bucket_size, or what the largest stage can fill. bf16 with fp32 accumulation and ZeRO 1
    (BF16_Optimizer) reduces in place.
    """
    dtype, accumulate = config.precision.dtype, config.precision.grad_accum_dtype
    if plan.zero_stage == 0 or (plan.zero_stage == 1 and dtype is DType.bf16 and accumulate is DType.fp32):
        return 0
    largest = max(stage_parameters(config, plan, stage) for stage in range(plan.pipeline_model_parallel_size))
    copies = 2 if plan.zero_stage >= 2 else 1
    return copies * min(config.zero.bucket_size, largest) * StateBytes.of(accumulate)
