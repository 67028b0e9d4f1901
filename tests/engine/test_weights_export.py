"""Training from a transformers folder under tp=2 x pp=2, and the checkpoint back in transformers: the same logits.

Our logits are those of the ranks that trained: the last stage's own copy of a tied table among them, so a copy that had
moved apart from the exported one would show (case D6). Tolerance 1e-5 in fp32 with logits of order 1, as in
tests/model/test_huggingface.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from conf.huggingface import model_of, read_config
from conf.huggingface_config import huggingface_config
from conf.schema import Activation, Config, Family, Objective
from corpus.batches import IGNORED, Batch
from engine.initial_weights import load_weights
from engine.sample import whole_vocabulary
from engine.weights_export import export_weights, open_stored
from engine.weights_import import import_weights
from tests.engine.cases import SEQUENCE, tiny_config
from tests.engine.on_ranks import one_step
from tests.engine.resumes import open_checkpoints, progress_at
from tests.ranks import run_ranks

CASES: dict[str, dict[str, Any]] = {
    "gpt2 tied": dict(family=Family.gpt2, tied=True),
    "gpt_neox": dict(family=Family.gpt_neox, model__rotary_fraction=0.5),
    "qwen3 tied": dict(family=Family.qwen3, tied=True, model__head_dim=24),
    "gpt_neox one after the other, tied": dict(family=Family.gpt_neox, tied=True, model__parallel_residual=False),
    "llama, biases": dict(family=Family.llama, model__attention_bias=True, model__mlp_bias=True),
    "bert": dict(family=Family.bert, model__type_vocab_size=3, model__norm_epsilon=1e-12),
    "megatron_bert": dict(family=Family.megatron_bert, model__activation=Activation.gelu_tanh),
    "mistral": dict(family=Family.mistral, model__sliding_window=7),
    "qwen2": dict(
        family=Family.qwen2, model__sliding_window=5,
        model__layer_types=["full_attention", "sliding_attention"] * 2,
    ),
}  # fmt: skip
SHORT = ("gpt2 tied", "gpt_neox", "qwen3 tied", "bert")
STEPS = 2


def config_of(case: str) -> Config:
    return tiny_config(
        parallel__tp=2, parallel__pp=2, zero__stage=1, parallel__sequence_parallel=case in ("gpt_neox", "bert"),
        data__mask_documents=False, **CASES[case],
    )  # fmt: skip


def tokens_of(config: Config) -> torch.Tensor:
    return torch.randint(0, config.model.vocab_size, (1, SEQUENCE), generator=torch.Generator().manual_seed(9))


def their_config(config: Config, folder: Path) -> Any:
    (folder / "config.json").write_text(json.dumps(huggingface_config(config.model)))
    return AutoConfig.from_pretrained(folder, attn_implementation="eager")


def train_from(config: Config, weights: Path, folder: Path) -> tuple[float, list[torch.Tensor]]:
    """(the first loss, whole logits before and after training) on this rank; a checkpoint is written."""
    checkpoints, parts = open_checkpoints(config, folder)
    trainer, groups = parts[0], parts[2]
    load_weights(checkpoints, weights)

    def logits() -> list[torch.Tensor]:
        tokens = tokens_of(config)
        found = trainer.logits(Batch(tokens, torch.arange(SEQUENCE)[None], torch.full_like(tokens, IGNORED)))
        return [] if found is None else [torch.stack([whole_vocabulary(row.float(), groups) for row in found[0]])]

    before = logits()
    results = [one_step(*parts, config, step) for step in range(1, STEPS + 1)]
    reports = checkpoints.save(progress_at(config, STEPS), wait=True)
    assert [report.error for report in reports] == [None]
    return results[0].loss, before + logits()


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in SHORT else pytest.mark.slow) for case in CASES]
)
def test_training_starts_from_a_folder_and_its_export_has_the_ranks_logits(case: str, tmp_path: Path) -> None:
    config = config_of(case)
    auto = AutoModelForMaskedLM if config.objective is Objective.mlm else AutoModelForCausalLM
    theirs = auto.from_config(their_config(config, tmp_path))
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    ranks = run_ranks(4, train_from, config, tmp_path / "theirs", tmp_path / "run")
    before, after = next(logits for _, logits in reversed(ranks) if logits)
    vocab = config.model.vocab_size
    tokens = tokens_of(config)
    torch.testing.assert_close(before[:, :vocab], theirs(tokens).logits[0].detach(), rtol=0, atol=1e-5)

    done = export_weights(
        open_stored(tmp_path / "run"), tmp_path / "out", dtype=None, max_bytes=200_000, tokenizer=None, say=print
    )
    assert done.has_tokenizer and not done.notes
    network, info = auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(after[:, :vocab], network(tokens).logits[0].detach(), rtol=0, atol=1e-5)
    assert (after - before).abs().max() > 1e-3, "two steps have changed the model"
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported["tie_word_embeddings"] is config.model.tie_word_embeddings and exported["eos_token_id"] == 256
    if config.model.tie_word_embeddings:
        assert network.get_output_embeddings().weight is network.get_input_embeddings().weight
        assert len(open_stored(tmp_path / "run").tensors.places) == len(dict(theirs.named_parameters()))

    import_weights(tmp_path / "out", tmp_path / "back", ignored=(), say=print)
    assert model_of(read_config(tmp_path / "out"), name="out") == open_stored(tmp_path / "back").config.model
