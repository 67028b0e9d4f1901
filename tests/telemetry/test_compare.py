"""What two runs are told to differ in: outcome, settings, and the step at which their curves part."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.promotion import loss_bounds
from telemetry.compare import differences, gate
from telemetry.compare.divergence import (
    NORM_16_BIT,
    Divergence,
    Tolerance,
    describe,
    divergence,
    event_line,
    events_before,
    tolerance_of,
)
from telemetry.compare.outcome import outcome, outcome_table, typical
from telemetry.compare.runs import Run, Start, load_run
from tests.telemetry.run_folders import COMMIT, event, plain_config, step_row, write_run

FP32 = Tolerance((1e-5, 0.0), (1e-5, 0.0))


def run_of(rows: list[dict], **config: object) -> Run:
    """Without a folder: of rows alone."""
    start = Start(1, 0, {}, plain_config(**config), {}, {})
    return Run("r", Path("r"), [start], {r["step"]: r for r in rows}, {}, ending="complete")


def test_outcome_is_of_medians_without_the_first_steps_and_of_the_largest_rank(tmp_path: Path) -> None:
    rows = [step_row(step, train__step_time_s=9.0 if step < 3 else 0.5 + step / 1000) for step in range(1, 12)]
    rows.append({"step": 11, "tokens": 1, "validation/loss": 6.5})
    rows.append(step_row(12, train__skipped=True, train__loss=2.0))
    rows.append({"step": 12, "tokens": 1, "validation/loss": 7.0})
    found = outcome(load_run(write_run(tmp_path / "a", rows=rows, ending="failed")))
    assert (found.ending, found.error, found.progress) == ("failed", "boom", "12 of 40")
    assert found.plan == "tp1 pp2 dp1 zero1 1f1b"
    assert (found.loss, found.validation_loss, found.best_validation_loss) == (2.0, 7.0, 6.5)
    assert found.step_time_s == pytest.approx(0.5065)  # 0.503 to 0.511 in steps 3 to 11, and 0.5 in step 12
    assert (found.memory_bytes, found.bubble, found.exposed) == (1_100_000_000, 0.2, 0.1)
    assert (found.skipped, found.starts) == (1, 1)


def test_the_table_has_ratios_to_the_first_run(tmp_path: Path) -> None:
    slower = [step_row(step, train__tokens_per_s=3072.0) for step in range(1, 41)]
    runs = [load_run(write_run(tmp_path / "a")), load_run(write_run(tmp_path / "b", rows=slower))]
    lines = outcome_table(runs).splitlines()
    [speed] = [line.split() for line in lines if line.startswith("tokens/s ") and "device" not in line]
    assert speed == ["tokens/s", "4,096", "3,072", "(-25.0%)"]
    assert [line.split()[-1] for line in lines if line.startswith("step time")] == ["s"]  # the same: no ratio


def test_a_number_beside_as_good_as_nothing_has_no_ratio(tmp_path: Path) -> None:
    rows = [[step_row(step, pipeline__bubble=bubble) for step in range(1, 41)] for bubble in (0.0002, 0.2)]
    runs = [load_run(write_run(tmp_path / name, rows=one)) for name, one in zip("ab", rows, strict=True)]
    [bubble] = [line.split() for line in outcome_table(runs).splitlines() if line.startswith("bubble")]
    assert bubble == ["bubble", "0.0%", "20.0%"]


def test_losses_after_other_numbers_of_steps_have_no_ratio(tmp_path: Path) -> None:
    short = [step_row(step, train__step_time_s=1.0) for step in range(1, 21)]
    runs = [load_run(write_run(tmp_path / "a")), load_run(write_run(tmp_path / "b", rows=short, ending=None))]
    lines = {line.split("  ")[0]: line for line in outcome_table(runs).splitlines()}
    assert "%" not in lines["train loss"] and "(+100.0%)" in lines["step time"]


def test_a_run_without_steps_has_an_outcome(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "a", rows=[], ending="failed"))
    assert outcome(run).loss is None and "failed" in outcome_table([run])


def test_what_is_not_finite_has_no_part_in_a_median() -> None:
    run = run_of([step_row(step, train__mfu=math.nan if step == 4 else 0.5) for step in range(1, 6)])
    assert typical(run, "train/mfu") == 0.5
    assert typical(run, "train/none") is None


def test_differences_are_key_by_key_and_group_by_group(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a")
    second = write_run(
        tmp_path / "b",
        config=plain_config(
            train__lr=2e-3, parallel__tp=2, data__sequence_length=128, run__id="b", data__num_workers=3
        ),
        identity={"corpus_fingerprint": "corpus-2", "git_commit": "f" * 40 + "+changes", "packages": {"torch": "2.14"},
                  "hosts": ["a", "b"]},
        plan={"tensor_model_parallel_size": 2}, patch="diff --git a/engine/loss.py b/engine/loss.py\n-x\n+y\n",
    )  # fmt: skip
    found = differences.differences([load_run(first), load_run(second)])
    settings = {(one.group, one.key): list(one.values) for one in found if one.kind == "setting"}
    assert settings == {
        ("config", "train.lr"): [3e-4, 2e-3],
        ("plan", "parallel.tp"): [1, 2],
        ("data", "data.sequence_length"): [256, 128],
        ("code", "git_commit"): [COMMIT, "f" * 40 + "+changes"],
        ("code", "patch"): [None, "diff --git a/engine/loss.py b/engine/loss.py\n-x\n+y\n"],
        ("packages", "torch"): ["2.13.0", "2.14"],
        ("hosts", "hosts"): ["a", "a, b"],
    }
    assert [one.key for one in found if one.kind == "derived"] == [
        "plan.tensor_model_parallel_size", "corpus_fingerprint", "ranks of each host"
    ]  # fmt: skip
    assert {one.key for one in found if one.kind == "label"} == {"run.id", "data.num_workers", "id"}
    text = differences.text(found, [load_run(first), load_run(second)])
    assert "2 changed lines in engine/loss.py" in text and "run.id" not in text
    assert [line.rstrip(":") for line in text.splitlines() if line.endswith(":")] == [
        "config", "plan", "data", "code", "packages", "hosts"
    ]  # fmt: skip


def test_changes_that_nobody_kept_are_named_so(tmp_path: Path) -> None:
    runs = [
        load_run(write_run(tmp_path / name, identity={"git_commit": commit}))
        for name, commit in (("a", COMMIT), ("b", COMMIT + "+changes"))
    ]
    values = {one.key: one.values[1] for one in differences.differences(runs)}
    assert values["patch"] == differences.UNKEPT


def test_a_part_that_one_record_lacks_differs_in_nothing(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "a"))
    poor = replace(run, starts=[replace(run.last, identity={"id": "a"}, plan={}, deepspeed={})])
    assert differences.differences([run, poor]) == []
    told = differences.text([], [run, replace(poor, name="w")])
    assert told == "nothing differs, of what both kept\nnot compared: plan, data, code, packages, hosts: not known of w"
    assert differences.text([], [run, run]) == "nothing differs"


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"seed": 7}, ["seed"]),
        ({"data__sequence_length": 64}, ["data.sequence_length"]),
        ({"train__lr": 1.0}, ["train.lr", "corpus_fingerprint"]),  # nothing chosen explains another corpus: other text
    ],
)
def test_a_corpus_ordered_by_another_seed_is_not_another_text(changes: dict, keys: list, tmp_path: Path) -> None:
    first = load_run(write_run(tmp_path / "a"))
    who = {"corpus_fingerprint": "corpus-2", "hosts": ["a"]}  # and a rank less on the same host
    second = load_run(write_run(tmp_path / "b", config=plain_config(**changes), identity=who))
    found = differences.differences([first, second])
    assert [one.key for one in found if one.kind == "setting"] == keys


def test_what_a_later_start_changed_is_told(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "a"))
    config = plain_config(train__lr=1.0, run__dir="elsewhere")
    run = replace(run, starts=[run.last, replace(run.last, number=2, step=10, config=config)])
    [(start, changed)] = differences.changes(run)
    assert (start.number, [one.key for one in changed]) == (2, ["train.lr"])


@pytest.mark.parametrize("metric", ["train__loss", "train__grad_norm"])
def test_the_parting_is_found_at_the_step_where_it_was_planted(metric: str) -> None:
    first = [step_row(step) for step in range(1, 41)]
    name = metric.replace("__", "/")
    second = [step_row(s, **{metric: first[s - 1][name] * (1.0002 if s >= 23 else 1.000009)}) for s in range(1, 41)]
    found = divergence(run_of(first), run_of(second), FP32)
    assert (found.axis, found.metric, found.place, found.agreed, found.for_good) == ("step", name, 23, 22, 23)
    assert found.values == (first[22][name], second[22][name])


def test_runs_that_come_together_again_part_for_good_later() -> None:
    first = [step_row(step) for step in range(1, 21)]
    second = [step_row(step, train__loss=1.0 if step in (5, 15, 16, 17, 18, 19, 20) else first[step - 1]["train/loss"])
              for step in range(1, 21)]  # fmt: skip
    found = divergence(run_of(first), run_of(second), FP32)
    assert (found.place, found.for_good) == (5, 15)
    assert "part for good at step 15" in describe(found, ["a", "b"])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_in_one_run_parts_and_in_both_agrees(value: float) -> None:
    good = [step_row(step) for step in (1, 2, 3)]
    bad = [step_row(step, train__loss=value) if step == 2 else step_row(step) for step in (1, 2, 3)]
    assert divergence(run_of(good), run_of(bad), FP32).place == 2
    assert "only one is a finite number" in describe(divergence(run_of(good), run_of(bad), FP32), ["a", "b"])
    assert divergence(run_of(bad), run_of(bad), FP32).place is None


def test_other_batch_sizes_are_compared_at_equal_tokens_and_that_is_said() -> None:
    first = run_of([step_row(step) for step in range(1, 13)])
    second = run_of([step_row(step) | {"tokens": 3 * 2048 * step} for step in range(1, 5)])
    found = divergence(first, second, FP32)
    assert (found.axis, found.shared) == ("tokens", [6144, 12288, 18432, 24576])
    assert (found.place, found.steps) == (6144, (3, 1))
    assert "steps of 2,048 and 6,144 tokens: compared at equal tokens" in describe(found, ["a", "b"])


def test_runs_that_share_nothing_are_told_so() -> None:
    found = divergence(run_of([step_row(1)]), run_of([step_row(2)]), FP32)
    assert found == Divergence("step", [])
    assert describe(found, ["a", "b"]) == "a and b share no step: nothing to compare"


def test_the_tolerance_is_that_of_the_wider_number_format() -> None:
    fp32, bf16 = run_of([]), run_of([], precision__dtype="bf16")
    layers = fp32.last.config["model"]["num_layers"]
    assert tolerance_of([fp32, fp32]) == FP32
    assert tolerance_of([fp32, bf16]) == Tolerance(loss_bounds("bf16", num_layers=layers), (NORM_16_BIT, 0.0))
    assert tolerance_of([bf16], loss=0.5, norm=0.25) == Tolerance((0.5, 0.0), (0.25, 0.0))


def test_events_before_a_step_are_the_nearest_of_the_attempt_that_counts(tmp_path: Path) -> None:
    """Steps 11 to 15 were trained twice: what happened behind the rollback comes before the second step 12."""
    events = [
        event(5, "checkpoint", second=5), event(10, "checkpoint", second=10), event(10, "evaluation", second=10),
        event(15, "bad step", second=15, what="spike"), event(10, "rollback", second=16, bad_step=15),
        event(12, "alert raised", second=18, alert="loss_spike"), event(12, "checkpoint", second=19),
        event(20, "checkpoint", second=30),
    ]  # fmt: skip
    run = load_run(write_run(tmp_path / "a", events=events))
    names = [one["event"] for one in events_before(run, 12)]
    assert names == ["checkpoint", "checkpoint", "bad step", "rollback", "alert raised"]
    assert [one["event"] for one in events_before(run, 12, most=1)] == ["alert raised"]
    assert event_line(events[3]) == "2026-01-01T00:00:15Z  step     15  bad step: what spike"


LOSSES = st.lists(
    st.one_of(st.floats(1e-3, 1e3), st.just(math.nan), st.just(math.inf)), min_size=1, max_size=30
).filter(lambda values: any(map(math.isfinite, values[:20])))


@given(losses=LOSSES, memory=st.integers(0, 2**40), mfu=st.floats(0, 1))
def test_a_run_compared_with_itself_has_no_difference_and_passes_every_gate(
    losses: list[float], memory: int, mfu: float
) -> None:
    rows = [
        step_row(step, train__loss=loss, train__peak_memory_bytes=memory, train__mfu=mfu)
        for step, loss in enumerate(losses, start=1)
    ]
    run = run_of(rows)
    assert differences.differences([run, run]) == []
    assert divergence(run, run, tolerance_of([run, run])).place is None
    verdict = gate.judge(run, run, gate.Limits(tolerance_of([run, run]), memory=0, utilisation=0, communication=0))
    assert verdict.failures == []
