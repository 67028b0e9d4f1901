"""The two columns: of a stage the rank that holds most, the mean of its waits; what is not known is not a number."""

from __future__ import annotations

from typing import Any

import pytest

from telemetry.prediction_table import Comparison, RankMeasurement, StepMeasurement

STATES = {"weights": 100, "gradients": 100, "master_weights": 100, "optimizer_moments": 200}
TIMES: dict[str, Any] = {"step_s": 0.5, "tokens_per_s": 1000.0, "mfu": 0.4, "bubble": [0.1, 0.2]}
STEPS = StepMeasurement(first_step=3, last_step=5, step_s=0.6, tokens_per_s=900.0, mfu=0.3)


def predicted(**times: Any) -> dict[str, Any]:
    memory = [STATES | {"states": 500, "activations": 1000, "total": 1500}] * 2
    axes = {"tensor": {"calls": 4, "bytes": 4000, "seconds": times.get("step_s") and 0.01}}
    return {"memory": memory, "communication": [axes, axes], **dict.fromkeys(TIMES), **times}


def rank(pp_rank: int, **changes: Any) -> RankMeasurement:
    values: dict[str, Any] = {"states": STATES, "activations": 900, "peak_bytes": 5000, "growth_bytes": 1600}
    return RankMeasurement(**{"pp_rank": pp_rank, "bubble": 0.15, **values, **changes})


def test_a_stage_shows_its_fullest_rank_and_the_mean_of_its_bubbles():
    ranks = [rank(0), rank(0, activations=1100, bubble=0.25), rank(1, bubble=0.3), rank(1, bubble=0.3)]
    found = Comparison(predicted(**TIMES), ranks, STEPS, None, {"device": "x"}).as_json()
    first, second = found["stages"]
    assert first["memory"]["states"] == {"predicted": 500, "measured": 500}
    assert first["memory"]["activations"] == {"predicted": 1000, "measured": 1100}
    assert first["bubble"] == {"predicted": 0.1, "measured": pytest.approx(0.2)}
    assert second["bubble"] == {"predicted": 0.2, "measured": pytest.approx(0.3)}
    assert found["step_s"] == {"predicted": 0.5, "measured": 0.6} and found["timed_steps"] == [3, 5]
    assert found["device"] == "x" and found["peak_bytes"] == [5000] * 4 and first["communication"] == {}


def test_both_columns_are_printed_with_their_ratio():
    text = Comparison(predicted(**TIMES), [rank(0), rank(1)], STEPS, None).text()
    assert "    0   500 B     500 B   1.00       1.0 kB     900 B   0.90     10%       15%" in text
    assert "step time  0.5 s predicted, 0.6 s measured, ratio 1.20" in text
    assert "MFU        40.0% predicted, 30.0% measured" in text and "steps 3 to 5" in text


def test_without_rates_memory_still_has_both_columns_and_a_line_says_how_to_get_times():
    reason = "cluster.rates has no kernel_s; measure them with recipes/probe.py"
    comparison = Comparison(predicted(), [rank(0), rank(1, bubble=None)], STEPS, reason)
    text = comparison.text()
    assert "1.00       1.0 kB     900 B   0.90       -       15%" in text
    assert f"step time  0.6 s measured; not predicted: {reason}" in text
    assert "MFU" not in text
    assert comparison.as_summary()["predicted/step_s"] is None


def test_communication_is_shown_by_stage_and_axis_where_it_was_timed():
    times = {"tensor": {"calls": 4, "bytes": 4000, "seconds": 0.02}, "other": {"calls": 1, "bytes": 8, "seconds": 0.1}}
    comparison = Comparison(predicted(**TIMES), [rank(0, collectives=times), rank(1, collectives=times)], STEPS, None)
    tensor = comparison.as_json()["stages"][0]["communication"]["tensor"]
    assert tensor["bytes"] == {"predicted": 4000, "measured": 4000}
    assert tensor["seconds"] == {"predicted": 0.01, "measured": 0.02}
    assert "    0  tensor      4.0 kB    4.0 kB   1.00     0.01      0.02" in comparison.text()
    assert "    0  other            -       8 B      -        -       0.1" in comparison.text()


def test_the_summary_has_flat_numbers_and_the_profile():
    about = {"profile": {"name": "tp2", "version": 1, "hash": "abc"}}
    summary = Comparison(predicted(**TIMES), [rank(0), rank(1)], STEPS, None, about).as_summary()
    assert (summary["predicted/step_s"], summary["measured/step_s"]) == (0.5, 0.6)
    assert (summary["predicted/states_bytes"], summary["measured/bubble"]) == (500, pytest.approx(0.15))
    assert (summary["profile/name"], summary["profile/version"], summary["profile/hash"]) == ("tp2", 1, "abc")
