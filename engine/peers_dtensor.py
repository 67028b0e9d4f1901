"""The peer of recipes/benchmark.py that splits transformers' Llama by torch's own tensor parallelism (DTensor).

The plan of torch's tutorial "Large Scale Transformer model training with Tensor Parallel": query, key, value, gate and
up column-wise, the outputs row-wise, embedding and head over the vocabulary, loss_parallel so that logits stay split.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from conf.schema import Config
from corpus.batches import Batch
from engine.device import this_device
from engine.distributed import start
from engine.measure import Step
from engine.peers import autocast, llama, optimizer_for
from parallel.plan import ParallelPlan


def styles() -> dict[str, ParallelStyle]:
    """What is done to which module of LlamaForCausalLM.

    Inputs become DTensors once for query, key and value (and once for gate and up): their gradients are summed once.
    """
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "model.layers.*.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Replicate()},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "model.layers.*.self_attn.q_proj": ColwiseParallel(),
        "model.layers.*.self_attn.k_proj": ColwiseParallel(),
        "model.layers.*.self_attn.v_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }


def transformers_dtensor(config: Config, plan: ParallelPlan) -> Step:
    """transformers' model under parallelize_module, with loss_parallel."""
    device = this_device()
    start(device, timeout_s=config.cluster.timeout_s)
    mesh = init_device_mesh(device.kind, (plan.tensor_model_parallel_size,))
    module = llama(config)
    parallelize_module(module, mesh, styles())
    optimizer = optimizer_for(module.parameters(), config)
    split = [p for p in module.parameters() if isinstance(p, DTensor)]
    whole = [p for p in module.parameters() if not isinstance(p, DTensor)]  # norms: the same on every rank

    def clip() -> None:
        norms = [torch.nn.utils.get_total_norm([p.grad for p in part if p.grad is not None]) for part in (split, whole)]
        plain = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        total = torch.linalg.vector_norm(torch.stack(plain))
        for part in (split, whole):
            torch.nn.utils.clip_grads_with_norm_(part, config.optimizer.clip_grad, total)

    def step(batches: Sequence[Batch]) -> float:
        total = torch.zeros(())
        for batch in batches:
            with loss_parallel():
                with autocast(config):
                    logits = module(input_ids=batch.tokens_BS).logits
                    loss = F.cross_entropy(logits.flatten(0, 1), batch.labels_BS.flatten()) / len(batches)
                loss.backward()
            total += loss.full_tensor().detach() if isinstance(loss, DTensor) else loss.detach()
        clip()
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step
