"""What the engine tests share: a tiny model, tokens, the plain-torch reference loop, and the same run under a plan.

The reference knows neither DeepSpeed nor a process group: the sequential Transformer, F.cross_entropy over whole
logits, torch's AdamW and clip_grad_norm_.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from conf.schema import Config, DataConfig, Family, ModelConfig, Objective, ParallelConfig
from corpus.batches import Batch
from corpus.dataset import Sample
from model.layers import Transformer, build_layer_specs
from model.tensor_parallel.random import RandomStreams
from parallel.architecture import FAMILIES, positions_travel
from parallel.groups import SINGLE
from parallel.plan import ParallelPlan

SEQUENCE = 32
STEPS = 20


class RandomTokens:
    """A dataset of random tokens with documents of random lengths; uneven numbers of unmasked tokens a sample."""

    sequence_length = SEQUENCE

    def __init__(self, *, vocab_size: int, seed: int = 0):
        self.vocab_size = vocab_size
        self.seed = seed

    def __len__(self) -> int:
        return 10_000

    def sample(self, index: int) -> Sample:
        random = np.random.default_rng((self.seed, index))
        tokens = random.integers(0, self.vocab_size, SEQUENCE + 1)
        cut = int(random.integers(4, SEQUENCE - 4))
        positions = np.concatenate([np.arange(cut), np.arange(SEQUENCE - cut)])
        mask = np.arange(SEQUENCE) < 1 + 2 * (index % 16)
        return Sample(tokens.astype(np.int64), positions.astype(np.int64), mask)


def tiny_config(*, family: Family = Family.llama, tied: bool = False, **changes: Any) -> Config:
    """The TINY model (180800 parameters untied), fp32, 8 samples a step; `changes` as group__field=value."""
    config = Config(
        model=ModelConfig(
            name="tiny", family=family, vocab_size=259, hidden_size=64, num_layers=4, num_attention_heads=4,
            num_key_value_heads=None if FAMILIES[family].multi_head else 2, ffn_hidden_size=128,
            max_position_embeddings=64, make_vocab_size_divisible_by=8,
            tie_word_embeddings=tied or FAMILIES[family].head_transform,
        ),
        parallel=ParallelConfig(),
        data=DataConfig(sequence_length=SEQUENCE),
        objective=Objective.clm if FAMILIES[family].causal else Objective.mlm,
        seed=1,
    )  # fmt: skip
    config.train.global_batch_size = 8
    config.train.train_iters = STEPS
    config.train.lr = 1e-3
    config.train.lr_warmup = 4
    config.zero.stage = 0
    config.zero.bucket_size = 200_000  # DeepSpeed allocates whole buckets
    for name, value in changes.items():
        group, field = name.split("__")
        assert hasattr(getattr(config, group), field), name
        setattr(getattr(config, group), field, value)
    return config


def global_batch(config: Config, step: int) -> Batch:
    """All samples of step `step` (from 1), [global batch, S]."""
    size = config.train.global_batch_size
    dataset = RandomTokens(vocab_size=config.model.vocab_size)
    samples = [dataset.sample((step - 1) * size + row) for row in range(size)]
    tokens = torch.from_numpy(np.stack([sample.tokens for sample in samples]))
    mask = torch.from_numpy(np.stack([sample.loss_mask for sample in samples if sample.loss_mask is not None]))
    labels = torch.where(mask, tokens[:, 1:], -100)
    positions = torch.from_numpy(np.stack([sample.positions for sample in samples]))
    return Batch(tokens[:, :-1].contiguous(), positions, labels)


def reference_model(config: Config) -> Transformer:
    streams = RandomStreams(tensor_rank=0)
    plan = ParallelPlan.from_config(one_rank(config), 1)
    specs = build_layer_specs(
        config.model, tensor=SINGLE, streams=streams, padded_vocab_size=plan.padded_vocab_size, sequence_parallel=False,
        recompute="none", mask_documents=config.data.mask_documents, seed=config.seed,
    )  # fmt: skip
    return Transformer(specs, streams=streams)


def one_rank(config: Config) -> Config:
    train = dataclasses.replace(config.train, micro_batch_size=1)
    return dataclasses.replace(config, parallel=ParallelConfig(), train=train)


def reference_run(config: Config, *, steps: int = STEPS, model: Transformer | None = None) -> list[tuple[float, float]]:
    """(loss, gradient norm before clipping) of each step, by plain torch in this process."""
    from engine.schedules import learning_rate_at

    model = model or reference_model(config)
    flat = [p for p in model.parameters() if p.dim() == 1]
    rest = [p for p in model.parameters() if p.dim() > 1]
    chosen = config.optimizer
    optimizer = torch.optim.AdamW(
        [{"params": rest, "weight_decay": chosen.weight_decay}, {"params": flat, "weight_decay": 0.0}],
        lr=1.0, betas=(chosen.beta1, chosen.beta2), eps=chosen.epsilon,
    )  # fmt: skip
    curve = []
    for step in range(1, steps + 1):
        batch = global_batch(config, step)
        inputs = (batch.tokens_BS, batch.positions_BS) if positions_travel(config) else batch.tokens_BS
        logits = model(inputs)[..., : config.model.vocab_size].float()
        losses = F.cross_entropy(logits.flatten(0, 1), batch.labels_BS.flatten(), ignore_index=-100, reduction="sum")
        loss = losses / (batch.labels_BS != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), chosen.clip_grad or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(config, step=step, tokens=0, total_tokens=0)
        optimizer.step()
        curve.append((loss.item(), norm.item()))
    return curve
