"""A checkpoint of any plan goes on under any other: bitwise under the same, within the parity tolerance under others.

The tolerance is test_parity's: 1e-5 relative in fp32 against the one-process reference loop.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conf.schema import Config, DType, Family, Schedule
from engine.device import this_device
from engine.distributed import start
from engine.held import loss_scale_state, set_loss_scale_state
from tests.engine.cases import reference_run, tiny_config
from tests.engine.on_ranks import one_step
from tests.engine.resumes import go_on, open_checkpoints, progress_at, resume_train_save, train_and_save
from tests.ranks import run_ranks

AFTER = 2  # steps before the checkpoint
STEPS = 20  # steps after it, compared


def split(tp: int = 1, pp: int = 1, dp: int = 1, zero: int = 0, **changes: Any) -> tuple[int, dict[str, Any]]:
    """(ranks, changes of the tiny config)."""
    return tp * pp * dp, {"parallel__tp": tp, "parallel__pp": pp, "zero__stage": zero, **changes}


SP = {"parallel__sequence_parallel": True}
DUAL = {"parallel__schedule": Schedule["dualpipev"]}
EAGER = {"parallel__schedule": Schedule["eager1f1b"]}
MICRO2 = {"train__micro_batch_size": 2}
TIED = {"tied": True}
GPT2 = {"family": Family.gpt2}
MQA = {"model__num_key_value_heads": 1}

# name: (from, to, changes of the model on both sides)
PAIRS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "tp 1-2": (split(), split(tp=2), {}),
    "tp 2-1": (split(tp=2), split(), {}),
    "tp 2-4, fewer kv heads": (split(tp=2), split(tp=4), {}),
    "tp 4-1, fewer kv heads": (split(tp=4), split(), {}),
    "tp 2-4, one kv head": (split(tp=2), split(tp=4), MQA),
    "pp 1-2": (split(), split(pp=2), {}),
    "pp 4-2": (split(pp=4), split(pp=2), {}),
    "pp 2-1, tied": (split(pp=2), split(), TIED),
    "pp 1-4, tied": (split(), split(pp=4), TIED),
    "dp 1-2": (split(), split(dp=2), {}),
    "dp 2-4, zero 1": (split(dp=2, zero=1), split(dp=4, zero=1), {}),
    "dp 4-1, zero 1": (split(dp=4, zero=1), split(), {}),
    "zero 0-1": (split(dp=2), split(dp=2, zero=1), {}),
    "zero 1-2": (split(dp=2, zero=1), split(dp=2, zero=2), {}),
    "zero 2-3": (split(dp=2, zero=2), split(dp=2, zero=3), {}),
    "zero 3-0": (split(dp=2, zero=3), split(dp=2), {}),
    "zero 3-1, dp 4-2": (split(dp=4, zero=3), split(dp=2, zero=1), {}),
    "zero 0-3, tp2": (split(tp=2), split(tp=2, dp=2, zero=3), {}),
    "zero 3-2, tp2 to tp1": (split(tp=2, dp=2, zero=3), split(dp=2, zero=2), {}),
    "sp on": (split(tp=2), split(tp=2, **SP), {}),
    "sp off": (split(tp=2, **SP), split(tp=4), {}),
    "1f1b to dualpipev": (split(pp=2), split(pp=2, **DUAL), {}),
    "dualpipev to 1f1b": (split(pp=2, **DUAL), split(pp=2), {}),
    "dualpipev to tp2, tied": (split(pp=2, **DUAL), split(tp=2), TIED),
    "1f1b to eager": (split(pp=2, zero=1), split(pp=4, **EAGER), {}),
    "micro-batch 1-2": (split(dp=2), split(dp=2, **MICRO2), {}),
    "micro-batch 2-1, pp": (split(pp=2, **MICRO2), split(pp=2, dp=2), {}),
    "tp2 pp2 to dp4": (split(tp=2, pp=2), split(dp=4, zero=1), {}),
    "tp2 pp2 to tp1 pp1, tied, vocabulary 259 (D1)": (split(tp=2, pp=2), split(), TIED),
    "tp2 pp2 to tp2, tied, vocabulary 259 (D1)": (split(tp=2, pp=2), split(tp=2), TIED),
    "tp2 pp2 dp2 to tp4 dp2": (split(tp=2, pp=2, dp=2, zero=1), split(tp=4, dp=2, zero=3), {}),
    "gpt2, tp2 to pp2": (split(tp=2), split(pp=2), GPT2),
    "gpt2 tied, pp2 tp2 to zero 3": (split(tp=2, pp=2, zero=1), split(dp=2, zero=3), GPT2 | TIED),
    "gpt_neox, tp4 to pp2 zero 1": (split(tp=4), split(pp=2, dp=2, zero=1), {"family": Family.gpt_neox}),
    "gpt_neox, zero 3 to tp2": (split(dp=2, zero=3), split(tp=2, dp=2, zero=1), {"family": Family.gpt_neox}),
    "qwen3, tp4 to zero 3": (split(tp=4, **SP), split(dp=2, zero=3), {"family": Family.qwen3}),
    "offload to none": (split(dp=2, zero=2, zero__offload_optimizer=True), split(dp=2, zero=1), {}),
}
SHORT = [
    "tp 2-4, fewer kv heads", "zero 2-3", "zero 3-0", "dualpipev to tp2, tied",
    "tp2 pp2 to tp1 pp1, tied, vocabulary 259 (D1)", "gpt2 tied, pp2 tp2 to zero 3",
    "gpt_neox, zero 3 to tp2",
]  # fmt: skip


def config_of(changes: dict[str, Any], model: dict[str, Any]) -> Config:
    return tiny_config(**(model | changes))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in PAIRS]
)
def test_a_run_goes_on_under_another_plan(name: str, tmp_path: Path) -> None:
    (from_ranks, from_changes), (to_ranks, to_changes), model = PAIRS[name]
    before, after = config_of(from_changes, model), config_of(to_changes, model)
    reference = reference_run(before, steps=AFTER + STEPS)
    for results, reports in run_ranks(from_ranks, train_and_save, before, tmp_path, AFTER):
        assert [report.error for report in reports] == [None]
        compare(results, reference[:AFTER])
    for results in run_ranks(to_ranks, go_on, after, tmp_path, STEPS):
        compare(results, reference[AFTER:])


def compare(results: Any, reference: Any, *, rel: float = 1e-5) -> None:
    for result, (loss, norm) in zip(results, reference, strict=True):
        assert result.loss == pytest.approx(loss, rel=rel)
        assert result.grad_norm == pytest.approx(norm, rel=rel)


SAME = {
    "tp2 pp2, zero 0": split(tp=2, pp=2),
    "dp2, zero 1": split(dp=2, zero=1),
    "dp2, zero 2": split(dp=2, zero=2),
    "dp2, zero 3": split(dp=2, zero=3),
    "dp2 pp2, bf16, zero 1": split(dp=2, pp=2, zero=1, precision__dtype=DType.bf16),
    "dropout": split(tp=2, model__hidden_dropout=0.1, model__attention_dropout=0.1),
}


FAST = {("tp2 pp2, zero 0", True), ("dp2, zero 3", False), ("dp2 pp2, bf16, zero 1", True)}


@pytest.mark.parametrize(
    ("name", "asynchronous"),
    [
        pytest.param(
            name, asynchronous, id=f"{name}, {'asynchronous' if asynchronous else 'synchronous'}",
            marks=() if (name, asynchronous) in FAST else pytest.mark.slow,
        )
        for name in SAME
        for asynchronous in (False, True)
    ],
)  # fmt: skip
def test_the_same_plan_goes_on_bitwise(name: str, asynchronous: bool, tmp_path: Path) -> None:
    """And the steps that are trained while an asynchronous save is written do not reach it."""
    ranks, changes = SAME[name]
    config = tiny_config(checkpoint__asynchronous=asynchronous, **changes)
    unbroken = run_ranks(
        ranks,
        train_and_save,
        config,
        tmp_path,
        5,
    )
    (tmp_path / "again").mkdir()
    return_values = run_ranks(ranks, _save_at_two_then_train, config, tmp_path / "again")
    resumed = run_ranks(ranks, go_on, config, tmp_path / "again", 3)
    for (whole, _), saving, later in zip(unbroken, return_values, resumed, strict=True):
        assert saving == whole
        assert later == whole[2:]


def _save_at_two_then_train(config: Config, folder: Path) -> Any:
    return train_and_save(config, folder, 5, at=2)[0]


@pytest.mark.parametrize(
    ("first", "second"),
    [(DType.bf16, DType.fp32), pytest.param(DType.fp32, DType.bf16, marks=pytest.mark.slow)],
)
def test_precision_may_change(first: DType, second: DType, tmp_path: Path) -> None:
    """fp32 master weights and moments are what is saved; what bf16 rounds is bounded as in test_mixes."""
    before = tiny_config(parallel__tp=2, zero__stage=1, precision__dtype=first)
    after = tiny_config(parallel__pp=2, zero__stage=1, precision__dtype=second)
    run_ranks(2, train_and_save, before, tmp_path, AFTER)
    reference = reference_run(before, steps=AFTER + 3)
    for results in run_ranks(2, go_on, after, tmp_path, 3):
        for result, (loss, norm) in zip(results, reference[AFTER:], strict=True):
            assert result.loss == pytest.approx(loss, rel=2**-8)
            assert result.grad_norm == pytest.approx(norm, rel=0.03)


@pytest.mark.slow
def test_restart_at_every_scale(tmp_path: Path) -> None:
    """1 -> 2 -> 4 -> 8 -> 4 -> 2 -> 1 ranks, another plan each time, one checkpoint between."""
    plans = [
        split(), split(tp=2), split(tp=2, pp=2), split(tp=2, pp=2, dp=2, zero=1), split(dp=4, zero=3), split(pp=2),
        split(),
    ]  # fmt: skip
    reference = reference_run(tiny_config(), steps=3 * len(plans))
    for number, (ranks, changes) in enumerate(plans):
        for results in run_ranks(ranks, resume_train_save, tiny_config(**changes), tmp_path, 3):
            compare(results, reference[3 * number : 3 * number + 3])


@pytest.mark.parametrize("name", ["dp2, zero 3", *(pytest.param(n, marks=pytest.mark.slow) for n in list(SAME)[:5:2])])
def test_a_checkpoint_is_loaded_into_a_trainer_that_has_gone_further(name: str, tmp_path: Path) -> None:
    """What a rollback does: the steps after it are bitwise those of before."""
    ranks, changes = SAME[name]
    for first, again in run_ranks(ranks, _roll_back, tiny_config(**changes), tmp_path):
        assert first == again


def _roll_back(config: Config, folder: Path) -> Any:
    checkpoints, parts = open_checkpoints(config, folder)
    first = [one_step(*parts, config, step) for step in (1, 2)]
    checkpoints.save(progress_at(config, 2), wait=True)
    first = [one_step(*parts, config, step) for step in (3, 4)]
    progress = checkpoints.load_newest(checkpoints.newest_first(), only=False)
    return first, [one_step(*parts, config, progress.step + number) for number in (1, 2)]


def test_what_loss_scaling_has_learnt_is_kept() -> None:
    """Case C2, as far as a CPU goes: the scaler's state after an overflow comes back."""
    for kept, original, restored in run_ranks(2, _scaler_states):
        assert kept["cur_scale"] == 2**15 and kept["last_overflow_iter"] == 3
        assert restored == original
        assert restored["cur_scale"] == 2**16


def _scaler_states() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """After an overflow and a good step; after four more good ones; and so on a scaler that took over the first."""
    start(this_device(), timeout_s=60)
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    trainers: list[Any] = []
    for _ in range(2):
        scaler = DynamicLossScaler(
            init_scale=2**16, scale_window=4, min_scale=1, delayed_shift=1, consecutive_hysteresis=False,
            raise_error_at_min_scale=False, dtype=torch.float16,
        )  # fmt: skip
        trainers.append(SimpleNamespace(engine=SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=scaler))))
    for overflow in (False, False, False, True, False):
        trainers[0].engine.optimizer.loss_scaler.update_scale(overflow)
    kept = loss_scale_state(trainers[0])
    set_loss_scale_state(trainers[1], kept)
    for trainer in trainers:
        for _ in range(4):
            trainer.engine.optimizer.loss_scaler.update_scale(False)
    return kept, loss_scale_state(trainers[0]), loss_scale_state(trainers[1])
