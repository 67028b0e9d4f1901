"""What the tests of inference share: folders of small random models, and our model of one on forked ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from conf.cli import compose_config, require_plan
from conf.schema import Config
from conf.weight_sources import with_source
from engine.device import this_device
from engine.distributed import start
from engine.inference import InferenceModel
from engine.weight_source import find_weights
from parallel.architecture import BIDIRECTIONAL
from parallel.forward_only import forward_only
from parallel.groups import open_groups
from parallel.plan import ParallelPlan
from tests.model.reference import small_model
from tests.model.test_huggingface import CASES, theirs
from tests.ranks import run_ranks

ONE_A_FAMILY = (
    "gpt2",
    "llama rope llama3",
    "mistral, window of 5, wide heads",
    "qwen2, some windows",
    "qwen3",
    "gpt_neox",
)
CAUSAL = [case for case, changes in CASES.items() if changes.get("family") not in BIDIRECTIONAL]
TP2_PP2 = ("parallel.tp=2", "parallel.pp=2")


def saved(case: str, folder: Path, **changes: Any) -> Path:
    """A folder of transformers with a small random model whose weights make its choices clear."""
    network = theirs(small_model(**CASES[case] | changes))
    network.save_pretrained(folder)
    return folder


def loaded(folder: Path, kind: Any = AutoModelForCausalLM) -> Any:
    return kind.from_pretrained(folder, attn_implementation="eager").eval()


def loaded_masked(folder: Path) -> Any:
    return loaded(folder, AutoModelForMaskedLM)


def configured(source: Path, *words: str, world_size: int) -> tuple[Config, ParallelPlan]:
    """As a recipe that does not train composes it."""
    words = ("data.tokenizer=byte", *words)
    config = compose_config(with_source([f"initialize_from={source}", *words], device=lambda: "cpu"))
    config = forward_only(config, world_size=world_size)
    require_plan(config, world_size=world_size, device="cpu")
    return config, ParallelPlan.from_config(config, world_size, device="cpu")


def opened(source: Path, *words: str) -> InferenceModel:
    """The model on this rank of the world that runs."""
    return built(*configured(source, *words, world_size=dist.get_world_size() if dist.is_initialized() else 1))


def built(config: Config, plan: ParallelPlan) -> InferenceModel:
    rank = dist.get_rank() if dist.is_initialized() else 0
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(plan.world_size), DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)
    device = this_device()
    start(device, timeout_s=60)
    groups = open_groups(plan)
    return InferenceModel(config, plan, groups, device=device.torch_device, source=find_weights(config))


def on_each(
    ranks: int, cases: dict[str, Path], words: tuple[str, ...], ask: Callable[..., Any]
) -> list[dict[str, Any]]:
    """`ask(model)` of every folder on each of so many ranks, which are started once; configs are composed before."""
    planned = {case: configured(folder, *words, world_size=ranks) for case, folder in cases.items()}
    return run_ranks(ranks, lambda: {case: ask(built(*of)) for case, of in planned.items()})
