"""A masked run is transformers' BERT on the same batches, under tensor and pipeline parallelism: losses and weights.

The reference is a plain loop over BertForMaskedLM in this process, with a mask of scores built from the samples'
documents alone; packed documents of random lengths, so that samples have padding and uneven numbers of labels.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForMaskedLM

from conf.huggingface_config import huggingface_config
from conf.schema import Config, CorpusSource, DataConfig, Family, LRSchedule, Objective
from corpus.batches import batch, micro_batches
from corpus.corpora import prepare_corpus
from corpus.prepare import PreparedCorpus
from model.huggingface import from_huggingface_state, to_huggingface_state
from model.tensor_parallel.parameter import from_canonical, slice_for_rank, to_canonical
from parallel.groups import AxisGroup
from tests.corpus.helpers import write_jsonl
from tests.engine.cases import reference_model, tiny_config
from tests.engine.on_ranks import open_trainer
from tests.ranks import run_ranks

STEPS, SEQUENCE = 4, 48
TOLERANCE = 1e-5  # fp32 sums in another order: 6e-8 relative each, carried on by four AdamW steps at lr 1e-3

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-pp2-sp": (4, {"parallel__tp": 2, "parallel__pp": 2, "parallel__sequence_parallel": True, "zero__stage": 1}),
    "dp2-zero2": (2, {"zero__stage": 2}),
}


def masked_config(folder: Path, **changes: Any) -> Config:
    fixed: dict[str, Any] = dict(train__lr_schedule=LRSchedule.constant, train__lr_warmup=0)
    config = tiny_config(train__micro_batch_size=2, **fixed, **changes)
    data = DataConfig(
        sources=[CorpusSource(path=str(folder / "text.jsonl"))], sequence_length=SEQUENCE, validation_fraction=0.0,
        cache_dir=str(folder / "cache"), mask_documents=config.data.mask_documents,
    )  # fmt: skip
    config.optimizer.epsilon = 1e-6  # or AdamW makes a whole step of a gradient that is nothing but rounding
    return dataclasses.replace(config, data=data)


def corpus_of(config: Config) -> PreparedCorpus:
    return prepare_corpus(config.data, vocab_size=config.model.vocab_size, seed=config.seed, objective=Objective.mlm)


def visible(positions_BS: torch.Tensor) -> torch.Tensor:
    """[B, 1, S, S] of 0 and the least number: each sees the tokens with as many starts before them as it has."""
    document = (positions_BS == 0).cumsum(1)
    apart = document[:, :, None] != document[:, None, :]
    return torch.zeros(apart.shape).masked_fill(apart, torch.finfo(torch.float32).min)[:, None]


def their_run(config: Config) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(losses, canonical weights after training) of transformers in a plain loop."""
    canonical: dict[str, torch.Tensor] = {}
    for parameter in reference_model(config).parameters():
        canonical |= to_canonical(parameter.detach(), parameter.info)  # type: ignore[attr-defined]
    settings = huggingface_config(config.model)
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(**settings), attn_implementation="eager")
    model.load_state_dict(to_huggingface_state(canonical, config.model))
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    chosen, train, corpus = config.optimizer, config.train, corpus_of(config)
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": chosen.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=train.lr, betas=(chosen.beta1, chosen.beta2), eps=chosen.epsilon,
    )  # fmt: skip
    losses = []
    for step in range(STEPS):
        size = train.global_batch_size
        one = batch(corpus.train, indices=range(step * size, (step + 1) * size))
        logits = model(
            input_ids=one.tokens_BS, position_ids=one.positions_BS, attention_mask=visible(one.positions_BS)
        ).logits
        loss = F.cross_entropy(logits.flatten(0, 1), one.labels_BS.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), chosen.clip_grad)
        optimizer.step()
        losses.append(loss.item())
    return losses, from_huggingface_state(model.state_dict(), config.model)


def our_run(config: Config) -> tuple[list[float], dict[str, Any], AxisGroup]:
    torch.set_num_threads(1)
    corpus = corpus_of(config)
    trainer, plan, groups, streams = open_trainer(config)
    losses = []
    for step in range(STEPS):
        first = step * config.train.global_batch_size
        batches = micro_batches(corpus.train, plan=plan, first_sample=first, data_rank=groups.data.rank)
        streams.seed_step(seed=config.seed, step=step, data_rank=groups.data.rank, stage=groups.pipeline.rank)
        losses.append(trainer.train_batch(batches if trainer.holds_data else None, lr=config.train.lr).loss)
    held = {p.info.name: (p.info, p.detach().clone()) for p in trainer.module.parameters()}  # type: ignore[attr-defined,union-attr]
    return losses, held, dataclasses.replace(groups.tensor, process_group=None)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, random = tmp_path_factory.mktemp("masked"), np.random.default_rng(5)
    words = ["".join(chr(97 + n) for n in random.integers(0, 26, random.integers(17, 60))) for _ in range(200)]
    write_jsonl(folder / "text.jsonl", words)
    return folder


@pytest.mark.parametrize(("layout", "family", "apart"), [
    ("tp2-pp2-sp", Family.bert, True), ("dp2-zero2", Family.megatron_bert, False),
])  # fmt: skip
def test_losses_and_weights_are_those_of_transformers(layout: str, family: Family, apart: bool, texts: Path) -> None:
    ranks, split = LAYOUTS[layout]
    config = masked_config(texts, family=family, data__mask_documents=apart)
    one = batch(corpus_of(config).train, indices=range(8))
    assert len(set((one.labels_BS != -100).sum(1).tolist())) > 1, "uneven numbers of labels"
    assert ((one.positions_BS == 0).sum(1) > 1).any(), "padding, or several documents"
    losses, canonical = their_run(config)
    split_config = masked_config(texts, family=family, data__mask_documents=apart, **split)
    for got, held, tensor in run_ranks(ranks, our_run, split_config):
        assert got == pytest.approx(losses, rel=TOLERANCE)
        for name, (info, value) in held.items():
            expected = slice_for_rank(from_canonical(canonical, info), info, tensor)
            assert torch.allclose(value, expected, atol=TOLERANCE, rtol=TOLERANCE), name


def test_what_is_padding_changes_no_logit_of_a_text(texts: Path) -> None:
    config = masked_config(texts, family=Family.megatron_bert, data__mask_documents=False)
    one = batch(corpus_of(config).train, indices=range(8))
    starts = (one.positions_BS == 0).cumsum(1)
    padding = starts > 1
    assert padding.any()
    model = reference_model(config)
    with torch.no_grad():
        logits = model((one.tokens_BS, one.positions_BS))
        changed = model((one.tokens_BS.masked_fill(padding, 7), one.positions_BS))
    assert torch.equal(logits[~padding], changed[~padding])
    assert not torch.equal(logits[padding], changed[padding])
