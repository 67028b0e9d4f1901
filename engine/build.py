"""Config and plan -> the trainer that fits: the pipeline engine for ZeRO 0 and 1, the plain engine for ZeRO 2 and 3."""

from __future__ import annotations

from typing import Any

from conf.schema import Config
from engine import last_state
from engine.device import Device
from engine.pipeline import PipelineTrainer
from engine.step import Trainer
from engine.zero import ZeroTrainer
from model.adapters import with_adapters
from model.layers import LayerSpec, build_layer_specs
from model.tensor_parallel.random import RandomStreams
from parallel.groups import Groups
from parallel.plan import ParallelPlan


def build_trainer(
    config: Config,
    plan: ParallelPlan,
    groups: Groups,
    *,
    streams: RandomStreams,
    device: Device,
    num_micro_batches: int,
) -> Trainer:
    """Build this rank's part of the model and its engine. Called on all ranks alike."""
    last_state.now("build_trainer")
    specs = layer_specs(
        config,
        plan,
        groups,
        streams=streams,
        sequence_parallel=plan.sequence_parallel,
        recompute=plan.recompute,
    )
    if plan.zero_stage <= 1:
        return PipelineTrainer(
            specs, config=config, plan=plan, groups=groups, streams=streams, num_micro_batches=num_micro_batches
        )
    return ZeroTrainer(
        specs,
        config=config,
        plan=plan,
        groups=groups,
        streams=streams,
        num_micro_batches=num_micro_batches,
        device=device.torch_device,
    )


def layer_specs(
    config: Config,
    plan: ParallelPlan,
    groups: Groups,
    *,
    streams: RandomStreams,
    sequence_parallel: bool,
    recompute: str,
) -> list[LayerSpec]:
    """All layers of the config's model in their order, with its adapters where it has some."""
    shared: dict[str, Any] = dict(
        tensor=groups.tensor, streams=streams, sequence_parallel=sequence_parallel, seed=config.seed
    )
    specs = build_layer_specs(
        config.model,
        padded_vocab_size=plan.padded_vocab_size,
        recompute=recompute,
        mask_documents=config.data.mask_documents,
        **shared,
    )
    return with_adapters(specs, model=config.model, lora=config.lora, **shared) if config.lora.rank > 0 else specs
