"""Fine-tuning is transformers' own: losses and weights of its Trainer on the same batches, under every axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conf.schema import Family
from corpus.batches import micro_batches
from model.huggingface import from_huggingface_state
from model.tensor_parallel.parameter import from_canonical, slice_for_rank
from parallel.groups import AxisGroup
from parallel.plan import ParallelPlan
from tests.engine.finetunes import chat_config, chat_corpus, our_run, trainer_run, transformers_model
from tests.ranks import run_ranks

# fp32 sums in another order: 2^-24 = 6e-8 relative each; six AdamW steps at lr 1e-3 carry them on.
TOLERANCE = 1e-5

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2-zero1": (2, {"zero__stage": 1}),
    "tp2-sp": (2, {"parallel__tp": 2, "parallel__sequence_parallel": True}),
    "pp2": (2, {"parallel__pp": 2}),
}


@pytest.fixture(
    scope="module", params=[(Family.llama, True), (Family.gpt2, False)], ids=["llama-packed", "gpt2-padded"]
)
def reference(request, tmp_path_factory) -> tuple[dict[str, Any], Path, list[float], dict[str, torch.Tensor]]:
    """(changes of the config, cache, losses, weights after training) of transformers.Trainer."""
    family, packing = request.param
    folder = tmp_path_factory.mktemp("finetune")
    changes = {"data__packing": packing, "model__family": family}
    if family is Family.gpt2:
        changes["model__num_key_value_heads"] = None
    config = chat_config(folder, **changes)
    model = transformers_model(config)
    losses = trainer_run(config, model, folder)
    return changes, folder, losses, from_huggingface_state(model.state_dict(), config.model)


def test_the_batches_have_uneven_numbers_of_unmasked_tokens_and_accumulate(tmp_path: Path) -> None:
    config = chat_config(tmp_path)
    plan = ParallelPlan.from_config(config, 1)
    counts = [int((b.labels_BS != -100).sum()) for b in micro_batches(
        chat_corpus(config).train, plan=plan, first_sample=0, data_rank=0
    )]  # fmt: skip
    assert len(counts) == 4 and len(set(counts)) > 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_weights_are_those_of_transformers_trainer(layout: str, reference) -> None:
    changes, folder, losses, canonical = reference
    ranks, split = LAYOUTS[layout]
    for got, held, tensor_rank, tensor_size in run_ranks(ranks, our_run, chat_config(folder, **changes, **split)):
        assert got == pytest.approx(losses, rel=TOLERANCE)
        axis = AxisGroup("tensor", tensor_rank, tensor_size, tuple(range(tensor_size)), None)
        for name, (info, value) in held.items():
            expected = slice_for_rank(from_canonical(canonical, info), info, axis)
            assert torch.allclose(value, expected, atol=TOLERANCE, rtol=TOLERANCE), name
