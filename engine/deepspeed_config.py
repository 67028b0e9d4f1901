"""Typed Config and plan -> the dict that DeepSpeed takes. Every knob that DeepSpeed would default is set here on
purpose.
"""

from __future__ import annotations

from typing import Any

from conf.schema import Config, DType
from parallel.plan import ParallelPlan
from parallel.stage_values import trained_parameters


def deepspeed_config(config: Config, plan: ParallelPlan, *, num_micro_batches: int) -> dict[str, Any]:
    """Batch numbers, precision, ZeRO, clipping.

    Clipping is DeepSpeed's where it keeps the gradients (ZeRO, 16-bit) and ours in plain fp32 (`engine.pipeline`),
    where its norm leaves out every stage but the first.
    """
    own_clipping = plan.zero_stage == 0 and config.precision.dtype is DType.fp32
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": num_micro_batches,
        "train_batch_size": plan.micro_batch_size * num_micro_batches * plan.data_parallel_size,
        "gradient_clipping": 0.0 if own_clipping else config.optimizer.clip_grad,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero_section(config, plan),
        "data_types": {"grad_accum_dtype": config.precision.grad_accum_dtype.value},
        # Partitioned sends save traffic on slow links between stages but do not fit sequence-sharded activations.
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False, "activation_checkpoint_interval": 0},
    }
    if config.precision.dtype is DType.bf16:
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
    if config.precision.dtype is DType.fp16:
        settings["fp16"] = {
            "enabled": True,
            "initial_scale_power": config.precision.initial_loss_scale_power,
            "loss_scale_window": config.precision.loss_scale_window,
            "min_loss_scale": config.precision.min_loss_scale,
        }
    return settings


def zero_section(config: Config, plan: ParallelPlan) -> dict[str, Any]:
    section: dict[str, Any] = {"stage": plan.zero_stage}
    if plan.zero_stage == 0:
        return section
    # DeepSpeed allocates a bucket whole: no more than the largest stage can fill.
    stages = range(plan.pipeline_model_parallel_size)
    bucket_size = min(config.zero.bucket_size, max(trained_parameters(config, plan, stage) for stage in stages))
    section |= {
        "reduce_bucket_size": bucket_size,
        "allgather_bucket_size": bucket_size,
        "overlap_comm": plan.pipeline_model_parallel_size == 1 and plan.zero_stage >= 2,
    }
    if config.zero.offload_optimizer:
        section["offload_optimizer"] = {"device": "cpu"}
    if plan.zero_stage == 3:
        section |= {"stage3_prefetch_bucket_size": bucket_size, "stage3_param_persistence_threshold": 0}
    return section
