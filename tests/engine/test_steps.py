"""One step and one evaluation on ranks: the token mean, clipping, decay groups, non-finite steps, evaluation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from conf.schema import Config, Family, LRSchedule, Schedule
from corpus.batches import Batch, evaluation_batches, micro_batches
from engine.loss import loss_scale
from model.tensor_parallel.parameter import from_canonical, slice_for_rank, to_canonical
from parallel.groups import SINGLE
from parallel.plan import ParallelPlan
from tests.engine.cases import RandomTokens, global_batch, reference_model, reference_run, tiny_config
from tests.engine.on_ranks import one_step, open_trainer
from tests.ranks import run_ranks

LAYOUTS = {
    "tp2": (2, {"parallel__tp": 2}),
    "pp2": (2, {"parallel__pp": 2}),
    "dp2-zero1": (2, {"zero__stage": 1}),
    "dp2-zero2": (2, {"zero__stage": 2}),
    "tp2-pp2": (4, {"parallel__tp": 2, "parallel__pp": 2}),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def named(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """This rank's parameters by global name."""
    return {p.info.name: p.detach().clone() for p in module.parameters()}  # type: ignore[attr-defined,union-attr]


def step_and_parameters(config: Config) -> tuple[float, float, dict[str, Any], dict[str, torch.Tensor]]:
    trainer, plan, groups, streams = open_trainer(config)
    before = named(trainer.module)
    result = one_step(trainer, plan, groups, streams, config, 1)
    after = named(trainer.module)
    infos = {p.info.name: p.info for p in trainer.module.parameters()}  # type: ignore[attr-defined,union-attr]
    changes = {name: (after[name] - before[name]) for name in before}
    return result.loss, result.grad_norm, infos, changes


@layouts
def test_the_loss_is_the_mean_over_all_unmasked_tokens_whatever_the_split(layout: str) -> None:
    """Case A4: samples hold 1, 3, 5, ... unmasked tokens; a mean of means would weigh short ones too much."""
    ranks, changes = LAYOUTS[layout]
    for micro_batch_size in (1, 2):
        config = tiny_config(train__micro_batch_size=micro_batch_size, **changes)
        [(loss, _)] = reference_run(config, steps=1)
        for got, *_ in run_ranks(ranks, step_and_parameters, config):
            assert got == pytest.approx(loss, rel=1e-6)


def test_token_mean_of_the_arithmetic_example() -> None:
    """Case A4: one token with loss ln 16 and seven with ln 2: 0.953077, where a mean of means gives 1.732868."""
    sums = [math.log(16), 7 * math.log(2)]
    scale = float(loss_scale(8, num_micro_batches=2, data=SINGLE))
    deepspeed_mean = sum(total * scale for total in sums) / 2
    assert deepspeed_mean == pytest.approx(0.953077, abs=1e-6)


def all_masked(config: Config) -> tuple[float, float, bool]:
    trainer, plan, groups, _ = open_trainer(config)
    dataset: Any = RandomTokens(vocab_size=config.model.vocab_size)
    batches = micro_batches(dataset, plan=plan, first_sample=0, data_rank=groups.data.rank)
    blank = [Batch(b.tokens_BS, b.positions_BS, torch.full_like(b.labels_BS, -100)) for b in batches]
    result = trainer.train_batch(blank if trainer.holds_data else None, lr=1e-3)
    return result.loss, result.grad_norm, result.skipped


def test_a_batch_without_any_valid_label_is_finite() -> None:
    for loss, norm, skipped in run_ranks(2, all_masked, tiny_config(parallel__pp=2)):
        assert (loss, norm, skipped) == (0.0, 0.0, False)


@layouts
@pytest.mark.parametrize("tied", [False, True])
def test_clipping_uses_the_true_norm(layout: str, tied: bool) -> None:
    """Case C6. With epsilon far above every gradient, AdamW's first step is lr / epsilon = 100 times the clipped
    gradient: the whole change has norm 100 x clip_grad, and each rank's part of each tensor is the one-process one."""
    ranks, changes = LAYOUTS[layout]
    as_gradient: dict[str, Any] = {
        "train__lr_schedule": LRSchedule.constant,
        "optimizer__epsilon": 1e3,
        "train__lr": 1e5,
        "optimizer__weight_decay": 0.0,
        "train__lr_warmup": 0,
    }
    config = tiny_config(tied=tied, optimizer__clip_grad=0.01, **as_gradient, **changes)
    model = reference_model(config)
    start = named(model)
    [(_, norm)] = reference_run(config, steps=1, model=model)
    expected: dict[str, torch.Tensor] = {}
    for parameter in model.parameters():
        info: Any = parameter.info  # type: ignore[attr-defined]
        expected |= to_canonical(parameter.detach() - start[info.name], info)
    total = math.sqrt(sum(float(change.double().square().sum()) for change in expected.values()))
    assert norm > 0.01 and total == pytest.approx(1.0, rel=1e-4)
    plan = ParallelPlan.from_config(config, ranks)
    for rank, (_, got_norm, infos, got) in enumerate(run_ranks(ranks, step_and_parameters, config)):
        assert got_norm == pytest.approx(norm, rel=1e-5)
        tensor_rank = plan.coordinate(rank)[2]
        axis = dataclasses.replace(SINGLE, rank=tensor_rank, size=plan.tensor_model_parallel_size)
        for name, change in got.items():
            part = slice_for_rank(from_canonical(expected, infos[name]), infos[name], axis)
            # norm weights are 1: float32 keeps their change, a difference of two, to 2 * 2^-24 = 1.2e-7
            assert torch.allclose(change, part, atol=2e-7, rtol=1e-4), name


def decay_only(config: Config) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Before and after one step whose gradients are all zero."""
    trainer, plan, groups, _ = open_trainer(config)
    before = named(trainer.module)
    dataset: Any = RandomTokens(vocab_size=config.model.vocab_size)
    batches = micro_batches(dataset, plan=plan, first_sample=0, data_rank=groups.data.rank)
    blank = [Batch(b.tokens_BS, b.positions_BS, torch.full_like(b.labels_BS, -100)) for b in batches]
    trainer.train_batch(blank if trainer.holds_data else None, lr=0.1)
    return {name: (before[name], value) for name, value in named(trainer.module).items()}


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("layout", ["pp2", "dp2-zero1", "dp2-zero2"])
def test_weight_decay_scales_matrices_and_leaves_norms_and_biases_alone(layout: str, family: Family) -> None:
    """Case C3: lr 0.1 and decay 0.5 scale every matrix by exactly 0.95; one-dimensional tensors stay bit for bit."""
    ranks, changes = LAYOUTS[layout]
    config = tiny_config(family=family, tied=True, optimizer__weight_decay=0.5, **changes)
    for result in run_ranks(ranks, decay_only, config):
        for name, (before, after) in result.items():
            if before.dim() == 1:
                assert torch.equal(before, after), name
            else:
                assert torch.allclose(after, before * 0.95, rtol=1e-6, atol=0), name


def poisoned(config: Config) -> list[tuple[bool, bool]]:
    """(skipped, parameters unchanged) of three steps; the second has one infinite weight on the last rank."""
    trainer, plan, groups, streams = open_trainer(config)
    seen = []
    for step in (1, 2, 3):
        victim = list(trainer.module.parameters())[-1]
        before = named(trainer.module)
        kept = victim.data.flatten()[0].clone()
        if step == 2 and groups.world.rank == groups.world.size - 1:
            victim.data.view(-1)[0] = math.inf
        result = one_step(trainer, plan, groups, streams, config, step)
        if step == 2 and groups.world.rank == groups.world.size - 1:
            victim.data.view(-1)[0] = kept
        same = all(torch.equal(before[name], value) for name, value in named(trainer.module).items())
        seen.append((result.skipped, same))
    return seen


@pytest.mark.parametrize("layout", ["pp2", "tp2", "dp2-zero1"])
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_on_all_ranks(layout: str) -> None:
    ranks, changes = LAYOUTS[layout]
    for seen in run_ranks(ranks, poisoned, tiny_config(**changes)):
        assert seen == [(False, False), (True, True), (False, False)]


class SixSamples(RandomTokens):
    def __len__(self) -> int:
        return 6


def train_with_evaluation(config: Config) -> tuple[float, float, float]:
    """Evaluation loss of the untrained model, then losses of two steps with an evaluation between them."""
    trainer, plan, groups, streams = open_trainer(config)
    dataset: Any = SixSamples(vocab_size=config.model.vocab_size)

    def evaluate() -> float:
        batches = evaluation_batches(
            dataset, plan=plan, data_rank=groups.data.rank, num_samples=64,
            micro_batch_multiple=trainer.evaluation_multiple,
        )  # fmt: skip
        return trainer.evaluate(batches if trainer.holds_data else None)

    first = evaluate()
    one = one_step(trainer, plan, groups, streams, config, 1).loss
    evaluate()
    return first, one, one_step(trainer, plan, groups, streams, config, 2).loss


@layouts
def test_evaluation_is_the_token_mean_on_every_rank_and_leaves_training_alone(layout: str) -> None:
    """Case B1: six samples, micro-batches of 1 and 4 (so the last is padded)."""
    ranks, changes = LAYOUTS[layout]
    for micro_batch_size in (1, 4):
        config = tiny_config(train__micro_batch_size=micro_batch_size, **changes)
        batch = global_batch(config, 1)
        logits = reference_model(config)((batch.tokens_BS[:6], batch.positions_BS[:6]))[..., : config.model.vocab_size]
        expected = float(F.cross_entropy(logits.flatten(0, 1), batch.labels_BS[:6].flatten(), ignore_index=-100))
        (one, _), (two, _) = reference_run(config, steps=2)
        for first, got_one, got_two in run_ranks(ranks, train_with_evaluation, config):
            assert first == pytest.approx(expected, rel=1e-5)
            assert (got_one, got_two) == pytest.approx((one, two), rel=1e-5)


def evaluated_in_parts(config: Config) -> tuple[float, bool]:
    """(evaluation loss of 20 samples, whether logits came) where a step has 8 micro-batches of 1."""
    trainer, plan, groups, _ = open_trainer(config)
    batches = evaluation_batches(
        RandomTokens(vocab_size=config.model.vocab_size), plan=plan, data_rank=groups.data.rank, num_samples=20,
        micro_batch_multiple=trainer.evaluation_multiple,
    )  # fmt: skip
    loss = trainer.evaluate(batches if trainer.holds_data else None)
    return loss, trainer.logits(batches[0]) is not None


def test_dualpipev_evaluates_more_samples_than_a_step_has() -> None:
    """Its buffers are those of a step: other numbers of micro-batches ended in a traceback."""
    (plain, _), *_ = run_ranks(1, evaluated_in_parts, tiny_config(train__micro_batch_size=1))
    config = tiny_config(
        train__micro_batch_size=1,
        parallel__pp=2,
        parallel__schedule=Schedule.dualpipev,
        zero__stage=0,
    )
    found = run_ranks(2, evaluated_in_parts, config)
    assert [loss for loss, _ in found] == pytest.approx([plain, plain], rel=1e-5)
    assert any(has_logits for _, has_logits in found)
