"""Learning rates by hand (case C4)."""

from __future__ import annotations

import math

import pytest

from conf.schema import LRSchedule
from engine.schedules import learning_rate, learning_rate_at
from tests.engine.cases import tiny_config


def rates(**changes: object) -> list[float]:
    config = tiny_config(
        train__lr=1e-3, train__lr_warmup=4, train__train_iters=10, train__min_lr_ratio=0.1,
        train__lr_schedule=LRSchedule.cosine,
    )  # fmt: skip
    for name, value in changes.items():
        setattr(config.train, name, value)
    return [learning_rate_at(config, step=step, tokens=step * 100, total_tokens=1000) for step in range(1, 11)]


def test_warm_up_is_linear_and_cosine_ends_at_a_tenth() -> None:
    curve = rates()
    assert curve[:4] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3])
    middle = 1e-4 + 9e-4 * 0.5  # step 7 is half way from 4 to 10
    assert curve[6] == pytest.approx(middle)
    assert curve[9] == pytest.approx(1e-4)


def test_the_curve_does_not_depend_on_micro_batches() -> None:
    assert rates(micro_batch_size=1) == rates(micro_batch_size=4)


def test_tokens_and_steps_draw_the_same_curve_where_a_step_has_a_fixed_number_of_tokens() -> None:
    assert rates(lr_unit="tokens", lr_warmup=400) == pytest.approx(rates())


def test_warm_up_as_long_as_the_run_ends_at_the_peak() -> None:
    curve = rates(lr_warmup=10)
    assert all(math.isfinite(rate) for rate in curve)
    assert curve[9] == pytest.approx(1e-3)


def test_wsd_is_flat_until_its_decay() -> None:
    curve = rates(lr_schedule=LRSchedule.wsd, lr_decay=4)
    assert curve[3:6] == pytest.approx([1e-3] * 3)
    assert curve[6:] == pytest.approx([1e-3 - 9e-4 * k / 4 for k in (1, 2, 3, 4)])


@pytest.mark.parametrize("schedule", list(LRSchedule))
def test_after_the_end_the_rate_stays(schedule: LRSchedule) -> None:
    values = [
        learning_rate(position, schedule=schedule, peak=1.0, min_ratio=0.1, warmup=2, end=10)
        for position in (10, 11, 99)
    ]
    assert values[0] == pytest.approx(1.0 if schedule is LRSchedule.constant else 0.1)
    assert values[1:] == [values[0]] * 2
