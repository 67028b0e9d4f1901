"""Adapters train as PEFT's do around transformers' model: losses and weights, under every axis and mix of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conf.schema import Family
from model.tensor_parallel.parameter import from_canonical, slice_for_rank
from parallel.groups import AxisGroup
from tests.engine.finetunes import (
    adapted_model,
    chat_config,
    from_peft,
    our_run,
    peft_model,
    peft_state,
    to_peft,
    trained_canonical,
    trainer_run,
)
from tests.ranks import run_ranks

TOLERANCE = 1e-5  # as in test_finetune_parity.py
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2-zero1": (2, {"zero__stage": 1}),
    "dp2-zero2": (2, {"zero__stage": 2}),
    "tp2-sp": (2, {"parallel__tp": 2, "parallel__sequence_parallel": True}),
    "tp2-pp2": (4, {"parallel__tp": 2, "parallel__pp": 2}),
}
MODELS: dict[str, dict[str, Any]] = {
    "llama-all": {"lora__rank": 4, "lora__alpha": 8.0},
    "gpt2-tied": {
        "lora__rank": 4, "lora__alpha": 8.0, "lora__target_modules": ["c_attn", "mlp.c_proj"],
        "model__family": Family.gpt2, "model__tie_word_embeddings": True, "model__num_key_value_heads": None,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS)
def reference(request, tmp_path_factory) -> tuple[dict[str, Any], Path, list[float], dict[str, torch.Tensor]]:
    """(changes of the config, cache, losses, adapters after training) of transformers.Trainer with PEFT."""
    folder = tmp_path_factory.mktemp("lora")
    config = chat_config(folder, **request.param)
    adapted = peft_model(config, to_peft(trained_canonical(adapted_model(config)), config))
    losses = trainer_run(config, adapted, folder)  # type: ignore[arg-type]
    return request.param, folder, losses, from_peft(peft_state(adapted), config)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_adapters_are_those_of_peft(layout: str, reference) -> None:
    changes, folder, losses, canonical = reference
    ranks, split = LAYOUTS[layout]
    for got, held, tensor_rank, tensor_size in run_ranks(ranks, our_run, chat_config(folder, **changes, **split)):
        assert got == pytest.approx(losses, rel=TOLERANCE)
        axis = AxisGroup("tensor", tensor_rank, tensor_size, tuple(range(tensor_size)), None)
        for name, (info, value) in held.items():
            expected = slice_for_rank(from_canonical(canonical, info), info, axis)
            assert torch.allclose(value, expected, atol=TOLERANCE, rtol=TOLERANCE), name
        assert any("lora_B" in name and value.abs().max() > 0 for name, (_, value) in held.items())
