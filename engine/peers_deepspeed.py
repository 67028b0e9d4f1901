"""Peers of recipes/benchmark.py that run transformers' Llama under DeepSpeed: ZeRO-1, PipelineModule, AutoTP.

DeepSpeed's own defaults, but for what the comparison fixes: batch, clipping, optimizer, fp32 or bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from conf.schema import Config, DType
from corpus.batches import Batch
from engine.device import this_device
from engine.distributed import muted, start
from engine.measure import Step
from engine.peers import llama, llama_config, llama_state, optimizer_for, token_mean
from parallel.plan import ParallelPlan


def settings(config: Config, plan: ParallelPlan, **more: Any) -> dict[str, Any]:
    """DeepSpeed's config dict."""
    bf16 = {"bf16": {"enabled": True}} if config.precision.dtype is DType.bf16 else {}
    return {
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.num_micro_batches,
        "gradient_clipping": config.optimizer.clip_grad,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,
        **bf16,
        **more,
    }


def transformers_zero1(config: Config, plan: ParallelPlan) -> Step:
    """transformers' model under ZeRO-1."""
    start(this_device(), timeout_s=config.cluster.timeout_s)
    return _engine_loop(llama(config), config, settings(config, plan, zero_optimization={"stage": 1}))


def transformers_autotp(config: Config, plan: ParallelPlan) -> Step:
    """transformers' model split by AutoTP; logits split over the vocabulary, never gathered."""
    start(this_device(), timeout_s=config.cluster.timeout_s)
    split = {"autotp_size": plan.tensor_model_parallel_size, "vocab_parallel_lm_head": True}
    return _engine_loop(llama(config), config, settings(config, plan, tensor_parallel=split), vocab_parallel=True)


def _engine_loop(
    module: LlamaForCausalLM, config: Config, deepspeed_config: dict[str, Any], *, vocab_parallel: bool = False
) -> Step:
    """backward() and step() once a micro-batch, as DeepSpeedEngine wants it.

    vocab_parallel: the model computes the loss itself, since the logits it returns are a share of the vocabulary.
    """
    with muted():
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer_for(module.parameters(), config), config=deepspeed_config
        )

    def loss_of(batch: Batch) -> Tensor:
        if vocab_parallel:
            return engine(input_ids=batch.tokens_BS, labels=batch.labels_BS, shift_labels=batch.labels_BS).loss
        return token_mean(engine(input_ids=batch.tokens_BS).logits, batch.labels_BS)

    def step(batches: Sequence[Batch]) -> float:
        total = torch.zeros(())
        for batch in batches:
            loss = loss_of(batch)
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        if engine.dp_world_size > 1:
            torch.distributed.all_reduce(total, group=engine.data_parallel_group)
        return float(total) / len(batches) / engine.dp_world_size

    return step


class _Embedding(nn.Module):
    def __init__(self, llama_config: LlamaConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(llama_config.vocab_size, llama_config.hidden_size)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return self.embed_tokens(tokens_BS)


class _Layer(LlamaDecoderLayer):
    """A decoder layer that makes its own rotary tables, once."""

    def __init__(self, llama_config: LlamaConfig, index: int, length: int):
        super().__init__(llama_config, index)
        tables = LlamaRotaryEmbedding(llama_config)(torch.zeros(()), torch.arange(length)[None])
        self.cos, self.sin = (nn.Buffer(table, persistent=False) for table in tables)

    def forward(self, hidden_BSH: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden_BSH, position_embeddings=(self.cos, self.sin))


class _Norm(nn.Module):
    def __init__(self, llama_config: LlamaConfig):
        super().__init__()
        self.norm = LlamaRMSNorm(llama_config.hidden_size, eps=llama_config.rms_norm_eps)

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        return self.norm(hidden_BSH)


class _Head(nn.Module):
    def __init__(self, llama_config: LlamaConfig):
        super().__init__()
        self.lm_head = nn.Linear(llama_config.hidden_size, llama_config.vocab_size, bias=False)

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        return self.lm_head(hidden_BSH)


def transformers_pipeline(config: Config, plan: ParallelPlan) -> Step:
    """transformers' decoder layers in a PipelineModule, cut by its default: equal numbers of parameters a stage."""
    start(this_device(), timeout_s=config.cluster.timeout_s)
    sizes = llama_config(config.model, sequence_length=config.data.sequence_length)
    blocks = [LayerSpec(_Layer, sizes, index, config.data.sequence_length) for index in range(config.model.num_layers)]
    layers = [LayerSpec(_Embedding, sizes), *blocks, LayerSpec(_Norm, sizes), LayerSpec(_Head, sizes)]
    with muted():
        module = PipelineModule(layers=layers, num_stages=plan.pipeline_model_parallel_size, loss_fn=token_mean)
    _load(module, llama_state(config))
    with muted():
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer_for(module.parameters(), config), config=settings(config, plan)
        )

    def step(batches: Sequence[Batch]) -> float:
        holds_data = engine.is_first_stage() or engine.is_last_stage()
        stream = iter([(batch.tokens_BS, batch.labels_BS) for batch in batches]) if holds_data else None
        return float(engine.train_batch(data_iter=stream))

    return step


def _load(module: PipelineModule, state: dict[str, Tensor]) -> None:
    """Each layer's weights by its place in the list of layers."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            index, _, path = name.partition(".")
            in_block = f"model.layers.{int(index) - 1}.{path}"
            whole = {"embed_tokens.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
            parameter.copy_(state[whole.get(path, path if path in state else in_block)])
