"""Adapters beside the parallel layers: outputs and gradients of PEFT's on one process, however they are split."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F

from conf.schema import Config, Family
from model.adapters import adapted_modules, with_adapters
from model.huggingface import load_canonical
from model.layers import Transformer, build_layer_specs
from model.tensor_parallel.init import generator_seed
from model.tensor_parallel.lora import Adapter, ColumnLora, Rows
from model.tensor_parallel.parameter import from_canonical, slice_for_rank
from model.tensor_parallel.random import RandomStreams
from parallel.adapters import block_adapters, block_modules, target_problems
from parallel.architecture import BIDIRECTIONAL
from parallel.groups import SINGLE
from tests.engine.cases import global_batch, tiny_config
from tests.engine.finetunes import (
    adapted_model,
    as_transformers_takes_it,
    from_peft,
    peft_model,
    to_peft,
    trained_canonical,
)
from tests.ranks import run_ranks, tensor_axis

CLOSE = 1e-5  # fp32 sums in another order, of values and gradients below 10
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-all": {"family": Family.llama},  # two key-value heads: on four ranks each is there twice
    "llama-some": {"family": Family.llama, "lora__target_modules": ["v_proj", "gate_proj", "o_proj"]},
    "gpt2": {"family": Family.gpt2},
    "gpt_neox": {"family": Family.gpt_neox, "lora__target_modules": ["dense", "dense_h_to_4h", "query_key_value"]},
}


def config_of(name: str) -> Config:
    return tiny_config(**{"lora__rank": 4, "lora__alpha": 6.0, **FAMILIES[name]})


def learnt(config: Config) -> dict[str, torch.Tensor]:
    """Canonical adapters with something in B too."""
    found = {}
    for name, value in trained_canonical(adapted_model(config)).items():
        generator = torch.Generator().manual_seed(generator_seed("learnt", name))
        found[name] = 0.1 * torch.randn(value.shape, generator=generator)
    return found


def ours(config: Config, tp: int, sequence_parallel: bool) -> tuple[torch.Tensor, dict[str, tuple[Any, torch.Tensor]]]:
    """(this rank's logits, gradients by name with their infos)."""
    tensor = tensor_axis(tp) if tp > 1 else SINGLE
    streams = RandomStreams(tensor_rank=tensor.rank)
    specs = build_layer_specs(
        config.model, tensor=tensor, streams=streams, padded_vocab_size=260, sequence_parallel=sequence_parallel,
        recompute="none", mask_documents=True, seed=config.seed,
    )  # fmt: skip
    specs = with_adapters(
        specs, model=config.model, lora=config.lora, tensor=tensor, streams=streams,
        sequence_parallel=sequence_parallel, seed=config.seed,
    )  # fmt: skip
    model = Transformer(specs, streams=streams)
    trained = [p for p in model.parameters() if p.requires_grad]
    load_canonical(trained, learnt(config), tensor=tensor)
    batch = global_batch(config, 1)
    logits = model((batch.tokens_BS, batch.positions_BS))
    weights = _weights(config)[..., tensor.rank * logits.shape[-1] :][..., : logits.shape[-1]]
    (logits * F.pad(weights, (0, logits.shape[-1] - weights.shape[-1]))).sum().backward()
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    gradients = {p.info.name: (p.info, p.grad.clone()) for p in trained}  # type: ignore[attr-defined,union-attr]
    return logits.detach(), gradients


def _weights(config: Config) -> torch.Tensor:
    """What the logits are multiplied with, so that every one has a gradient of its own."""
    batch = global_batch(config, 1)
    generator = torch.Generator().manual_seed(7)
    return torch.randn((*batch.tokens_BS.shape, config.model.vocab_size), generator=generator) / 100


def theirs(config: Config) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(logits, gradients by canonical name) of PEFT around transformers' model."""
    adapted: peft.PeftModel = peft_model(config, to_peft(learnt(config), config))
    inputs = as_transformers_takes_it(global_batch(config, 1))
    del inputs["labels"]
    logits = adapted(**inputs).logits
    (logits * _weights(config)).sum().backward()
    state = {n.replace(".default", ""): p.grad for n, p in adapted.named_parameters() if p.requires_grad}
    return logits.detach(), from_peft(state, config)


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, False), (4, True)])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_those_of_peft(name: str, tp: int, sequence_parallel: bool) -> None:
    config = config_of(name)
    expected, gradients = theirs(config)
    results = run_ranks(tp, ours, config, tp, sequence_parallel)
    logits = torch.cat([logits for logits, _ in results], dim=-1)[..., : config.model.vocab_size]
    assert torch.allclose(logits, expected, atol=CLOSE, rtol=CLOSE)
    for rank, (_, got) in enumerate(results):
        axis = SINGLE if tp == 1 else type(SINGLE)("tensor", rank, tp, tuple(range(tp)), None)
        for parameter, (info, gradient) in got.items():
            part = slice_for_rank(from_canonical(gradients, info), info, axis)
            assert torch.allclose(gradient, part, atol=CLOSE, rtol=CLOSE), parameter
    assert len(results[0][1]) == 2 * len(adapted_modules(config.model, config.lora.target_modules))


def first_values(config: Config, tp: int) -> dict[str, tuple[Any, torch.Tensor]]:
    tensor = tensor_axis(tp) if tp > 1 else SINGLE
    streams = RandomStreams(tensor_rank=tensor.rank)
    specs = build_layer_specs(
        config.model, tensor=tensor, streams=streams, padded_vocab_size=260, sequence_parallel=False,
        recompute="none", mask_documents=True, seed=config.seed,
    )  # fmt: skip
    specs = with_adapters(
        specs, model=config.model, lora=config.lora, tensor=tensor, streams=streams, sequence_parallel=False,
        seed=config.seed,
    )  # fmt: skip
    model = Transformer(specs, streams=streams)
    return {p.info.name: (p.info, p.detach()) for p in model.parameters() if p.requires_grad}  # type: ignore[attr-defined]


def test_first_values_are_pefts_distribution_and_the_same_under_every_plan() -> None:
    """kaiming_uniform with a = sqrt 5 over the whole matrix: even in +-1/sqrt(inputs), so sd 1/sqrt(3 inputs)."""
    config = tiny_config(lora__rank=64, model__ffn_hidden_size=256)
    whole = trained_canonical(adapted_model(config))
    for rank, held in enumerate(run_ranks(2, first_values, config, 2)):
        axis = type(SINGLE)("tensor", rank, 2, (0, 1), None)
        for name, (info, value) in held.items():
            assert torch.equal(value, slice_for_rank(from_canonical(whole, info), info, axis)), name
    for name, value in whole.items():
        if "lora_B" in name:
            assert not value.any()
        else:  # of 4096 values and more: the estimate is off by 1 % or so
            assert value.std().item() == pytest.approx((3 * value.shape[1]) ** -0.5, rel=0.05)
            assert value.abs().max() <= value.shape[1] ** -0.5


@pytest.mark.parametrize("family", [family for family in Family if family not in BIDIRECTIONAL])
def test_the_ledger_counts_the_adapters_that_are_built(family: Family) -> None:
    config = tiny_config(family=family, lora__rank=4)
    modules = adapted_modules(config.model, ["all-linear"])
    assert {m.split(".", 3)[-1] for m in modules} == set(block_modules(config.model))
    for tp in (1, 2, 4):
        for held in run_ranks(tp, first_values, config, tp):
            built = sum(value.numel() for _, value in held.values())
            assert built == config.model.num_layers * block_adapters(config.model, config.lora, tp=tp).total


def test_dropout_is_one_mask_for_all_tensor_ranks_and_none_in_evaluation() -> None:
    config = tiny_config(lora__rank=4, lora__dropout=0.5)
    for first, again, evaluated, plain in run_ranks(2, dropped, config):
        assert not torch.equal(first, again) and torch.equal(evaluated, plain)


def dropped(config: Config) -> tuple[torch.Tensor, ...]:
    tensor = tensor_axis(2)
    streams = RandomStreams(tensor_rank=tensor.rank)
    adapter = Adapter(rank=8, alpha=8, dropout=config.lora.dropout, seed=1)
    lora = ColumnLora(
        adapter, [Rows("m", (("m", 16),))], in_features=32, tensor=tensor, sequence_parallel=False, streams=streams
    )
    seen: list[torch.Tensor] = []
    x = torch.ones(1, 64, 32)
    for parameter in lora.b:
        parameter.data.fill_(1.0)
    for _ in range(2):
        streams.seed_step(seed=1, step=len(seen), data_rank=0, stage=0)
        out = lora(x).detach()
        both = [torch.empty_like(out) for _ in range(2)]
        torch.distributed.all_gather(both, out)
        assert torch.equal(both[0], both[1])  # B is ones on both, so equal outputs mean equal masks
        seen.append(out)
    lora.eval()
    return seen[0], seen[1], lora(x).detach(), torch.nn.functional.linear(x @ lora.a[0].t(), lora.b[0]).detach()


def test_a_target_that_names_nothing_is_refused_with_what_would() -> None:
    [line] = target_problems(tiny_config(family=Family.gpt2).model, ["q_proj", "c_attn"])
    assert line.startswith("lora.target_modules=[q_proj,c_attn]: q_proj names no matrix")
    assert "use all-linear, or some of c_attn, c_proj, c_fc" in line
    assert target_problems(tiny_config().model, []) and not target_problems(tiny_config().model, ["self_attn.q_proj"])
