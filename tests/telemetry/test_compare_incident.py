"""The started record of an incident: filled from the timelines, of one trouble at a time, in the order of time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from recipes.compare import main
from telemetry.compare.divergence import divergence, events_before, tolerance_of
from telemetry.compare.incident import incident
from telemetry.compare.runs import Run, load_run
from telemetry.compare.signs import chosen, signs
from tests.telemetry.run_folders import bad_run, event, loss_at, plain_config, step_row, write_run


def sections_of(text: str) -> dict[str, str]:
    return {head.split(" (")[0]: body for head, body in (part.split("\n", 1) for part in text.split("## ")[1:])}


def record(bad: Run, good: Run | None = None) -> dict[str, str]:
    found = divergence(good, bad, tolerance_of([good, bad])) if good is not None else None
    return sections_of(incident(good, bad, found))


def resumed(folder: Path, events: Sequence[Mapping[str, Any]], *, lr: float = 0.5, **named: Any) -> Path:
    """Its second start, which `events` have, changed the rate."""
    write_run(folder, events=events, **named)
    second = json.loads((folder / "starts" / "1.json").read_text())
    second["config"]["train"]["lr"] = lr
    (folder / "starts" / "2.json").write_text(json.dumps(second))
    return folder


def test_the_incident_record_is_filled_from_the_two_timelines(tmp_path: Path) -> None:
    good = load_run(write_run(tmp_path / "good"))
    bad = load_run(bad_run(tmp_path / "bad", config=plain_config(train__lr=0.1), identity={"git_commit": "f" * 40}))
    found = divergence(good, bad, tolerance_of([good, bad]))
    text = incident(good, bad, found)
    sections = dict(part.split("\n", 1) for part in text.split("## ")[1:])
    assert "step 23: bad step: what spike" in sections["Earliest known bad (all below is of it)"]
    assert "time: 2026-01-01T00:00:12Z" in sections["Earliest known bad (all below is of it)"]
    assert "until step 22 it agrees with good" in sections["Last known good"]
    for row in (f"| git_commit | 0123456789abcdef0123456789abcdef01234567 | {'f' * 40} |",
                "| **train.lr** (config) | 0.0003 | 0.1 |"):  # fmt: skip
        assert row in sections["Identities on either side"]
    slices = sections["Smallest affected slice"]
    assert "stage 1 (alert loss_spike" in slices and "samples 176 to 183" in slices
    assert "rank 1 on host b: computes 2.00 x as long" in slices
    assert f"good at step 23: loss {loss_at(23):.6g}" in sections["Known-good counterexample"]
    mitigates = sections["What mitigates"]
    assert "lower train.lr" in mitigates and "done: `2026-01-01T00:00:14Z" in mitigates
    assert "not confirmed" in sections["Cause"]
    assert "confirmed: config" in incident(good, bad, found, confirmed="config: train.lr")


def test_an_incident_between_two_starts_of_one_run_names_what_the_second_changed(tmp_path: Path) -> None:
    folder = bad_run(tmp_path / "bad")
    first = json.loads((folder / "starts" / "1.json").read_text())
    first["config"]["train"]["lr"] = 0.5
    (folder / "starts" / "2.json").write_text(json.dumps(first))
    lines = (folder / "timeline.jsonl").read_text().splitlines(keepends=True)
    again = [event(0, "start", second=11, start=2), event(22, "resume", second=11)]
    lines[2:2] = [json.dumps(one) + "\n" for one in again]
    (folder / "timeline.jsonl").write_text("".join(lines))
    text = incident(None, load_run(folder), None)
    assert "Start 1 of bad was good, start 2 is bad" in text and "| **train.lr** (config) | 0.0003 | 0.5 |" in text


def test_without_trouble_there_is_no_incident(tmp_path: Path) -> None:
    assert "No sign of trouble" in incident(None, load_run(write_run(tmp_path / "a")), None)


@pytest.mark.parametrize("written", [0, 20, 27])
def test_a_resumed_run_is_read_in_the_order_of_time(written: int, tmp_path: Path) -> None:
    """Older folders have step 0 in the event of every start; killed at step 27, the run went on from step 20."""
    events = [
        event(10, "checkpoint", second=10), event(20, "checkpoint", second=20), event(25, "evaluation", second=25),
        event(26, "alert raised", second=26, alert="early"),
        event(written, "start", second=60, start=2), event(27, "alerts", second=60),
        event(20, "resume", second=61, checkpoint="c/step-20"), event(23, "bad step", second=63, what="spike"),
        event(30, "checkpoint", second=70),
    ]  # fmt: skip
    run = load_run(resumed(tmp_path / "a", events))
    assert [start.step for start in run.starts] == [0, 20]
    assert [one["event"] for one in events_before(run, 23, most=9)] == [
        "start", "checkpoint", "checkpoint", "alert raised", "start", "resume", "bad step"
    ]  # fmt: skip
    assert [one["event"] for one in events_before(run, 20, most=9)] == ["start", "checkpoint"]
    told = [(one.step, one.what.split(":")[0]) for one in signs(run, None)]
    assert told == [
        (26, "alert raised"),
        (27, "a start ended without a word after step 27, and the next went on from step 20"),
        (23, "bad step"),
    ]


def test_times_on_either_side_are_of_the_attempt_that_counts(tmp_path: Path) -> None:
    events = [
        event(20, "checkpoint", second=20), event(30, "checkpoint", second=30),
        event(0, "start", second=60, start=2), event(20, "resume", second=61), event(30, "checkpoint", second=70),
    ]  # fmt: skip
    rows = [step_row(step, train__loss=math.nan if step == 25 else loss_at(step)) for step in range(1, 41)]
    text = record(load_run(resumed(tmp_path / "a", events, rows=rows)))
    assert "time: after 2026-01-01T00:01:01Z, before 2026-01-01T00:01:10Z" in text["Earliest known bad"]
    assert "the checkpoint of step 20" in text["Last known good"]
    assert "Start 1 of a was good, start 2 is bad (from step 20 on)" in text["Identities on either side"]


def test_a_start_that_died_before_it_resumed_trained_nothing(tmp_path: Path) -> None:
    events = [event(20, "checkpoint", second=20), event(0, "start", second=60, start=2)]
    run = load_run(resumed(tmp_path / "a", events, ending=None))
    assert run.starts[1].step == 20 and run.start_at(15).number == 1


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        (None, "step 40: the run ended without a word after step 40"),
        ("interrupted", "step 40: the run was interrupted after step 40"),
    ],
)
def test_a_run_that_did_not_end_has_a_sign(ending: str | None, words: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", ending=None)
    if ending is not None:
        (folder / "failed.json").write_text(json.dumps({"error": ending}))
    assert words in record(load_run(folder))["Earliest known bad"]


def test_a_start_that_was_stopped_by_request_is_no_sign(tmp_path: Path) -> None:
    events = [event(20, "stopped on request"), event(0, "start", start=2), event(20, "resume"), event(40, "end")]
    assert signs(load_run(resumed(tmp_path / "a", events)), None) == []


def test_of_two_troubles_slice_and_mitigation_are_those_of_the_sign(tmp_path: Path) -> None:
    events = [
        event(8, "alert raised", second=8, alert="slow", slice="rank 3", mitigation="move it"),
        event(12, "alert cleared", second=12, alert="slow"),
        event(30, "alert raised", second=30, alert="loss_spike", slice="stage 1", mitigation="lower train.lr"),
        event(30, "bad step", second=31, what="spike", samples=[232, 240]), event(20, "rollback", second=32),
    ]  # fmt: skip
    run = load_run(write_run(tmp_path / "a", events=events))
    assert chosen(signs(run, None)).step == 8
    text = record(run)
    assert "rank 3" in text["Smallest affected slice"] and "stage 1" not in text["Smallest affected slice"]
    assert "samples 56 to 63 of the corpus order are those of step 8" in text["Smallest affected slice"]
    assert "232" not in text["Smallest affected slice"]
    assert "move it" in text["What mitigates"] and "lower train.lr" not in text["What mitigates"]
    assert "loss_spike cleared" not in text["What mitigates"]
    assert "by then in its range again" in text["What mitigates"]
    assert "rollback" not in text["What mitigates"]  # it was for the second


def test_a_parting_that_persists_is_not_mitigated(tmp_path: Path) -> None:
    text = record(load_run(bad_run(tmp_path / "bad")), load_run(write_run(tmp_path / "good")))
    assert "rollback" in text["What mitigates"]
    assert "no sign" not in text["What mitigates"] and "not mitigated: the runs stay apart" in text["What mitigates"]


def test_identities_are_given_in_full_and_a_patch_by_its_path(tmp_path: Path) -> None:
    long = {name: name[0] * 64 for name in ("config_fingerprint", "corpus_fingerprint", "tokenizer_fingerprint")}
    patch = "diff --git a/x b/x\n+y\n"
    folder = bad_run(tmp_path / "bad", identity=long, patch=patch)
    for text in (record(load_run(folder)), record(load_run(folder), load_run(write_run(tmp_path / "good")))):
        identities = text["Identities on either side"]
        assert all(value in identities for value in long.values())
        assert f"{folder / 'starts' / '1.patch'} (1 changed lines in x)" in identities


def test_last_known_good_of_trouble_from_the_first_step_on(tmp_path: Path) -> None:
    rows = [step_row(step, train__loss=math.nan) for step in range(11, 21)]
    began = [event(10, "resume", checkpoint="runs/e/x/checkpoints/step-00000010")]
    text = record(load_run(write_run(tmp_path / "a", rows=rows, events=began)))
    assert "the checkpoint of step 10: runs/e/x/checkpoints/step-00000010" in text["Last known good"]
    first = [step_row(step, train__loss=math.nan) for step in range(1, 21)]
    assert "step 0, its initial weights" in record(load_run(write_run(tmp_path / "b", rows=first)))["Last known good"]


def test_the_samples_follow_from_the_batch_size_where_a_step_is_not_there(tmp_path: Path) -> None:
    rows = [step_row(step) for step in range(1, 31)]
    run = load_run(
        write_run(tmp_path / "a", rows=rows, ending="failed", config=plain_config(train__global_batch_size=8))
    )
    assert "samples 240 to 247 of the corpus order are those of step 31" in record(run)["Smallest affected slice"]


def test_a_record_that_a_person_goes_on_with_is_not_written_over(tmp_path: Path) -> None:
    words = [str(bad_run(tmp_path / "a")), "--incident", "--out", str(tmp_path / "r.html")]
    for name in ("incident.md", "incident-2.md", "incident-3.md"):
        assert main(words) == 0
        (tmp_path / name).write_text("mine")
    assert {path.name for path in tmp_path.glob("*.md")} == {"incident.md", "incident-2.md", "incident-3.md"}
    assert (tmp_path / "incident.md").read_text() == "mine"
