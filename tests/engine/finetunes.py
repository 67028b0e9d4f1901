"""What the fine-tuning tests share: conversations, transformers' own Trainer on the same batches, and ours on ranks.

The reference is transformers.Trainer with gradient accumulation: it divides the sum of token losses by the labels of
all micro-batches of a step (num_items_in_batch).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor
from torch.utils.data import SequentialSampler

from conf.huggingface_config import huggingface_config
from conf.schema import Config, CorpusSource, DataConfig, DataFormat, LRSchedule
from corpus.batches import Batch, batch, micro_batches
from corpus.corpora import prepare_corpus
from corpus.prepare import PreparedCorpus
from model.adapters import adapter_tensors, with_adapters
from model.attention import document_starts, key_mask
from model.huggingface import from_stored, to_huggingface_state, to_stored
from model.layers import Transformer, build_layer_specs
from model.tensor_parallel.parameter import to_canonical
from model.tensor_parallel.random import RandomStreams
from parallel.groups import SINGLE
from tests.engine.cases import reference_model, tiny_config
from tests.engine.on_ranks import open_trainer

CHATS = Path(__file__).parents[1] / "corpus" / "chat.jsonl"
TEMPLATE = Path(__file__).parents[2] / "conf" / "chat_templates" / "plain.jinja"
STEPS = 6
LR = 1e-3


def chat_config(folder: Path, **changes: Any) -> Config:
    """The TINY model on 64 conversations, 8 samples of 64 tokens a step, micro-batches of 2."""
    config = tiny_config(train__micro_batch_size=2, train__lr_schedule=LRSchedule.constant, train__lr_warmup=0)
    data = DataConfig(
        sources=[CorpusSource(path=str(CHATS))], format=DataFormat.conversations, chat_template=str(TEMPLATE),
        sequence_length=64, validation_fraction=0.0, cache_dir=str(folder),
    )  # fmt: skip
    config = dataclasses.replace(config, data=data)
    config.train.lr = LR
    config.optimizer.epsilon = 1e-6  # or AdamW makes a whole step of a gradient that is nothing but rounding
    for name, value in changes.items():
        group, field = name.split("__")
        setattr(getattr(config, group), field, value)
    return config


def chat_corpus(config: Config) -> PreparedCorpus:
    return prepare_corpus(config.data, vocab_size=config.model.vocab_size, seed=config.seed)


def transformers_model(config: Config) -> transformers.PreTrainedModel:
    """transformers' model with the weights that ours begin with."""
    canonical: dict[str, Tensor] = {}
    for parameter in reference_model(config).parameters():
        canonical |= to_canonical(parameter.detach(), parameter.info)  # type: ignore[attr-defined]
    settings = huggingface_config(config.model)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**settings), attn_implementation="eager"
    )
    state = to_huggingface_state(canonical, config.model)
    # files say embed_out where the module of transformers 5 says lm_head
    model.load_state_dict({name.replace("embed_out", "lm_head"): value for name, value in state.items()})
    return model


def as_transformers_takes_it(ours: Batch) -> dict[str, Tensor]:
    """Labels at their own places (it shifts them itself), conversations kept apart by a mask of scores."""
    labels = torch.full_like(ours.labels_BS, -100)
    labels[:, 1:] = ours.labels_BS[:, :-1]
    mask = key_mask(document_starts(ours.positions_BS), dtype=torch.float32)
    return {
        "input_ids": ours.tokens_BS, "position_ids": ours.positions_BS, "labels": labels,
        "attention_mask": mask.clamp_min(torch.finfo(torch.float32).min),
    }  # fmt: skip


class _InOrder(transformers.Trainer):
    """Samples in order, and every step's loss as it was, without the logs' rounding."""

    losses: list[float]

    def _get_train_sampler(self, *args: Any, **named: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    def training_step(self, *args: Any, **named: Any) -> Tensor:
        loss = super().training_step(*args, **named)
        self.losses.append(float(loss))
        return loss


def trainer_run(
    config: Config, model: transformers.PreTrainedModel, folder: Path, *, steps: int = STEPS
) -> list[float]:
    """The loss of each step of transformers.Trainer, which leaves its weights in `model`."""
    corpus, train = chat_corpus(config), config.train
    samples = [batch(corpus.train, indices=[index]) for index in range(steps * train.global_batch_size)]
    rows = [{name: value[0] for name, value in as_transformers_takes_it(one).items()} for one in samples]
    accumulated = train.global_batch_size // train.micro_batch_size
    chosen = config.optimizer
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=train.micro_batch_size,
        gradient_accumulation_steps=accumulated, learning_rate=train.lr, lr_scheduler_type="constant",
        weight_decay=chosen.weight_decay, adam_beta1=chosen.beta1, adam_beta2=chosen.beta2,
        adam_epsilon=chosen.epsilon, max_grad_norm=chosen.clip_grad, use_cpu=True, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True, remove_unused_columns=False, seed=1,
    )  # fmt: skip
    trainer = _InOrder(model=model, args=arguments, train_dataset=rows)  # type: ignore[arg-type]
    trainer.losses = []
    trainer.train()
    return [sum(trainer.losses[n : n + accumulated]) for n in range(0, len(trainer.losses), accumulated)]


def adapted_model(config: Config) -> Transformer:
    """Ours with its adapters, whole in this process."""
    streams = RandomStreams(tensor_rank=0)
    specs = build_layer_specs(
        config.model, tensor=SINGLE, streams=streams, padded_vocab_size=config.model.vocab_size,
        sequence_parallel=False, recompute="none", mask_documents=True, seed=config.seed,
    )  # fmt: skip
    specs = with_adapters(
        specs, model=config.model, lora=config.lora, tensor=SINGLE, streams=streams, sequence_parallel=False,
        seed=config.seed,
    )  # fmt: skip
    return Transformer(specs, streams=streams)


def trained_canonical(module: torch.nn.Module) -> dict[str, Tensor]:
    """Whole canonical tensors of what a module in one process trains."""
    canonical: dict[str, Tensor] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            canonical |= to_canonical(parameter.detach(), parameter.info)  # type: ignore[attr-defined]
    return canonical


def to_peft(canonical: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Canonical tensors of adapters -> PEFT's state dict."""
    return to_stored(canonical, adapter_tensors(config.model, config.lora))


def from_peft(state: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    return from_stored(state, adapter_tensors(config.model, config.lora))


def peft_model(config: Config, state: Mapping[str, Tensor]) -> peft.PeftModel:
    """PEFT's adapters of these values around transformers' model."""
    settings: dict[str, Any] = {"r": config.lora.rank, "lora_alpha": config.lora.alpha, "task_type": "CAUSAL_LM"}
    targets = config.lora.target_modules
    settings["target_modules"] = "all-linear" if targets == ["all-linear"] else targets
    adapted = peft.get_peft_model(transformers_model(config), peft.LoraConfig(**settings))
    loaded = peft.set_peft_model_state_dict(adapted, dict(state))
    assert not loaded.unexpected_keys and not [key for key in loaded.missing_keys if "lora" in key]
    return adapted


def peft_state(adapted: peft.PeftModel) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in peft.get_peft_model_state_dict(adapted).items()}


def our_run(config: Config, steps: int = STEPS) -> tuple[list[float], Mapping[str, tuple[Any, Tensor]], int, int]:
    """(losses, this rank's parameters with their infos by name, tensor rank, tensor size)."""
    torch.set_num_threads(1)
    corpus = chat_corpus(config)
    trainer, plan, groups, streams = open_trainer(config)
    losses = []
    for step in range(1, steps + 1):
        first = (step - 1) * config.train.global_batch_size
        batches = micro_batches(corpus.train, plan=plan, first_sample=first, data_rank=groups.data.rank)
        streams.seed_step(seed=config.seed, step=step, data_rank=groups.data.rank, stage=groups.pipeline.rank)
        losses.append(trainer.train_batch(batches if trainer.holds_data else None, lr=config.train.lr).loss)
    held = {p.info.name: (p.info, p.detach().clone()) for p in trainer.module.parameters() if p.requires_grad}  # type: ignore[attr-defined,union-attr]
    return losses, held, groups.tensor.rank, groups.tensor.size
