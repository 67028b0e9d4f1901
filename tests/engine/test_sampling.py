"""Which tokens may be drawn is what transformers' warpers leave, and how often each is drawn is its probability."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from conf.schema import GenerateConfig
from engine.sampling import allowed_logits, drawn, draws_of


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 7, 50, 1000])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999, 1.0])
def test_temperature_top_k_and_top_p_leave_exactly_what_transformers_leaves(temperature, top_k, top_p):
    logits = 3 * torch.randn(64, 200, generator=torch.Generator().manual_seed(1))
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    wanted = warpers(torch.zeros(64, 1, dtype=torch.long), logits.clone())
    ours = allowed_logits(logits, GenerateConfig(temperature=temperature, top_k=top_k, top_p=top_p))
    assert torch.equal(ours.isfinite(), wanted.isfinite())
    assert torch.equal(ours[ours.isfinite()], wanted[wanted.isfinite()])


def test_the_likeliest_token_always_stays_and_equals_of_the_kth_do():
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert allowed_logits(logits, GenerateConfig(top_p=1e-9)).isfinite().sum(1).tolist() == [1, 1]
    assert allowed_logits(logits, GenerateConfig(top_k=2)).isfinite().sum(1).tolist() == [3, 4]


def test_tokens_are_drawn_as_often_as_their_probability_says():
    rows = 40_000
    logits = torch.tensor([0.0, 1.0, -torch.inf, 2.0, -1.0, -torch.inf]).expand(rows, -1)
    counts = drawn(logits, [draws_of(3, (1, 2), number) for number in range(rows)]).bincount(minlength=6)
    wanted = rows * logits[0].double().softmax(0)
    assert counts[2] == counts[5] == 0
    seen = wanted > 0
    # chi-square of 3 degrees of freedom is above 16.3 once in a thousand seeds; this seed is fixed
    assert ((counts - wanted)[seen] ** 2 / wanted[seen]).sum() < 16.3


def test_draws_depend_on_seed_prompt_and_number_alone():
    def first(*of) -> float:
        return torch.rand((), generator=draws_of(*of), dtype=torch.float64).item()

    assert first(1, (5, 6), 0) == first(1, (5, 6), 0)
    assert len({first(1, (5, 6), 0), first(2, (5, 6), 0), first(1, (56,), 0), first(1, (5, 6), 1)}) == 4
