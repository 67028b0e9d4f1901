"""Programs of other packages that train the same model: a transformers Llama in the loop its users write.

What recipes/benchmark.py compares with; here for one process and under DistributedDataParallel. Same initial weights,
tokens, loss, clipping and torch's fused AdamW with the same two parameter groups as ours; first losses are compared in
tests/engine/test_benchmark.py. Not here: DeepSpeed's (engine/peers_deepspeed.py) and DTensor (engine/peers_dtensor.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from conf.schema import Config, DType, ModelConfig
from corpus.batches import Batch
from engine.device import this_device
from engine.distributed import start
from engine.measure import Step
from engine.optimizer import build_optimizer, parameter_groups
from model.huggingface import to_huggingface_state
from model.layers import Transformer, build_layer_specs
from model.tensor_parallel.parameter import to_canonical
from model.tensor_parallel.random import RandomStreams
from parallel.groups import SINGLE
from parallel.plan import ParallelPlan
from parallel.sizes import sizes


def llama_config(model: ModelConfig, *, sequence_length: int) -> LlamaConfig:
    """transformers' config of the same model, with sdpa attention and without a key-value cache."""
    shape = sizes(model)
    settings: dict[str, Any] = dict(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.ffn_hidden_size,
        max_position_embeddings=max(model.max_position_embeddings, sequence_length),
        rms_norm_eps=model.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        tie_word_embeddings=model.tie_word_embeddings,
        attention_bias=shape.parts.qkv_bias,
        mlp_bias=shape.parts.mlp_bias,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return LlamaConfig(**settings)


def whole_transformer(config: Config, *, padded_vocab_size: int) -> Transformer:
    """Our model in one module on one process, without any engine."""
    streams = RandomStreams(tensor_rank=0)
    specs = build_layer_specs(
        config.model, tensor=SINGLE, streams=streams, padded_vocab_size=padded_vocab_size, sequence_parallel=False,
        recompute="none", mask_documents=config.data.mask_documents, seed=config.seed,
    )  # fmt: skip
    return Transformer(specs, streams=streams)


def llama_state(config: Config) -> dict[str, torch.Tensor]:
    """Our initial weights under transformers' names."""
    transformer = whole_transformer(config, padded_vocab_size=config.model.vocab_size)
    canonical: dict[str, torch.Tensor] = {}
    for parameter in transformer.parameters():
        canonical |= to_canonical(parameter.detach(), parameter.info)  # type: ignore[attr-defined]
    return to_huggingface_state(canonical, config.model)


def llama(config: Config) -> LlamaForCausalLM:
    """transformers' model with our initial weights, in training mode."""
    module = LlamaForCausalLM(llama_config(config.model, sequence_length=config.data.sequence_length))
    module.load_state_dict(llama_state(config))
    return module.train()


def optimizer_for(parameters: Any, config: Config) -> torch.optim.AdamW:
    """The optimizer all contenders use."""
    return build_optimizer(parameter_groups(parameters, config.optimizer), config.optimizer, lr=config.train.lr)


def token_mean(logits_BSV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of one micro-batch."""
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), labels_BS.flatten())


def autocast(config: Config) -> Any:
    """torch's automatic mixed precision where the config asks for bf16."""
    bf16 = config.precision.dtype is DType.bf16
    return torch.autocast(this_device().kind, torch.bfloat16) if bf16 else nullcontext()


def plain_loop(forward: Callable[[torch.Tensor], torch.Tensor], module: torch.nn.Module, config: Config) -> Step:
    """forward, backward, clip, step: no engine."""
    optimizer = optimizer_for(module.parameters(), config)

    def step(batches: Sequence[Batch]) -> float:
        total = torch.zeros(())
        for batch in batches:
            with autocast(config):
                loss = token_mean(forward(batch.tokens_BS), batch.labels_BS) / len(batches)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(module.parameters(), config.optimizer.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step


def torch_loop(config: Config, plan: ParallelPlan) -> Step:
    """Our Transformer in a plain torch loop."""
    module = whole_transformer(config, padded_vocab_size=config.model.vocab_size)
    return plain_loop(module, module, config)


def transformers_loop(config: Config, plan: ParallelPlan) -> Step:
    """transformers' model in a plain torch loop."""
    module = llama(config)
    return plain_loop(lambda tokens_BS: module(input_ids=tokens_BS).logits, module, config)


def transformers_ddp(config: Config, plan: ParallelPlan) -> Step:
    """transformers' model under DistributedDataParallel; gradients travel with the last micro-batch only."""
    start(this_device(), timeout_s=config.cluster.timeout_s)
    module = DistributedDataParallel(llama(config), gradient_as_bucket_view=True)
    optimizer = optimizer_for(module.parameters(), config)

    def step(batches: Sequence[Batch]) -> float:
        total = torch.zeros(())
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with nullcontext() if last else module.no_sync():
                with autocast(config):
                    loss = token_mean(module(input_ids=batch.tokens_BS).logits, batch.labels_BS) / len(batches)
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(module.parameters(), config.optimizer.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    return step
