"""Recomputation under dropout, fewer micro-batches than stages, batch ramp-up (cases B5, B6)."""

from __future__ import annotations

import pytest
import torch

from conf.schema import Config, Recompute
from tests.engine.cases import reference_run, tiny_config
from tests.engine.on_ranks import one_step, open_trainer, train_steps
from tests.ranks import run_ranks


def three_steps(config: Config) -> dict[str, torch.Tensor]:
    """This rank's parameters after three steps."""
    trainer, plan, groups, streams = open_trainer(config)
    for step in (1, 2, 3):
        one_step(trainer, plan, groups, streams, config, step)
    return {p.info.name: p.detach().clone() for p in trainer.module.parameters()}  # type: ignore[attr-defined,union-attr]


@pytest.mark.parametrize("layout", [{"parallel__pp": 2}, {"parallel__tp": 2}], ids=["pp2", "tp2"])
def test_recomputation_changes_nothing_under_dropout(layout: dict) -> None:
    """Case B5: bit for bit, at every interval; the embedding has moved by the same amount."""
    dropout = {"model__hidden_dropout": 0.1, "model__attention_dropout": 0.1}
    plain = run_ranks(2, three_steps, tiny_config(**dropout, **layout))
    for mode, interval in ((Recompute.selective, 1), (Recompute.full, 1), (Recompute.full, 2)):
        changes = {"parallel__recompute": mode, "parallel__recompute_interval": interval}
        again = run_ranks(2, three_steps, tiny_config(**dropout, **layout, **changes))
        for before, after in zip(plain, again, strict=True):
            for name, value in before.items():
                assert torch.equal(value, after[name]), (mode, interval, name)


def test_one_micro_batch_through_four_stages_computes_the_same() -> None:
    """Case B6: three quarters of the step are idle, which the plan says; the numbers are those of one process."""
    config = tiny_config(parallel__pp=4, train__micro_batch_size=8)
    reference = reference_run(config, steps=2)
    for results in run_ranks(4, train_steps, config, 2):
        assert [r.loss for r in results] == pytest.approx([loss for loss, _ in reference], rel=1e-6)


def ramped(config: Config) -> list[tuple[float, float]]:
    """Two steps of half the batch, then two of the whole, over the same stream of samples."""
    from corpus.batches import micro_batches
    from tests.engine.cases import RandomTokens

    trainer, plan, groups, streams = open_trainer(config)
    curve, first = [], 0
    for step in (1, 2, 3, 4):
        count = plan.num_micro_batches if step > 2 else plan.num_micro_batches // 2
        trainer.set_num_micro_batches(count)
        batches = micro_batches(
            RandomTokens(vocab_size=config.model.vocab_size), plan=plan, first_sample=first,
            data_rank=groups.data.rank, num_micro_batches=count,
        )  # fmt: skip
        streams.seed_step(seed=config.seed, step=step, data_rank=groups.data.rank, stage=groups.pipeline.rank)
        result = trainer.train_batch(batches if trainer.holds_data else None, lr=1e-3)
        curve.append((result.loss, result.grad_norm))
        first += count * plan.micro_batch_size * plan.data_parallel_size
    return curve


@pytest.mark.parametrize(
    "layout",
    [{"parallel__pp": 2}, {"zero__stage": 1}, {"zero__stage": 2}],
    ids=["pp2", "dp2-zero1", "dp2-zero2"],
)
def test_the_number_of_micro_batches_may_change_between_steps(layout: dict) -> None:
    """Batch ramp-up: the same curve as one rank under the same ramp."""
    [expected] = run_ranks(1, ramped, tiny_config())
    for curve in run_ranks(2, ramped, tiny_config(**layout)):
        for got, wanted in zip(curve, expected, strict=True):
            assert got == pytest.approx(wanted, rel=1e-5)
