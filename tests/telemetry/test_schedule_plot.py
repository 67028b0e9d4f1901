"""The drawing and the trace of a simulated step, read back."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
from matplotlib import image as images
from matplotlib import pyplot
from matplotlib.figure import Figure

from parallel.timeline import StageTimes, Timeline, simulate
from telemetry.schedule_plot import plot_timeline
from telemetry.trace import Span, write_trace


def timeline(schedule: str = "1f1b", ranks: int = 4, micro_batches: int = 8, send_s: float = 0.0) -> Timeline:
    times = StageTimes(0.0101, 0.0203, send_s)
    stages = ranks * (2 if schedule in ("dualpipev", "interleaved") else 1)
    return simulate(schedule, [times] * stages, ranks=ranks, num_micro_batches=micro_batches)


@pytest.mark.parametrize("schedule", ["1f1b", "eager1f1b", "dualpipev", "gpipe", "interleaved"])
def test_a_trace_has_a_track_for_each_rank_in_microseconds_without_overlap(schedule: str, tmp_path: Path) -> None:
    simulated = timeline(schedule, send_s=0.0007)
    write_trace(simulated, tmp_path / "trace.json")
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {row["tid"]: row["args"]["name"] for row in rows if row["ph"] == "M" and row["name"] == "thread_name"}
    assert names == {rank: f"rank {rank}" for rank in range(4)}
    tracks = defaultdict(list)
    for row in rows:
        if row["ph"] == "X":
            tracks[row["tid"]].append(row)
    assert sum(map(len, tracks.values())) == len(simulated.events)
    for rank, track in tracks.items():
        track.sort(key=lambda row: row["ts"])
        # In nanoseconds, the viewer's unit: as floats in microseconds the sums would round.
        ends = [round(row["ts"] * 1000) + round(row["dur"] * 1000) for row in track]
        starts = [round(row["ts"] * 1000) for row in track]
        assert all(end <= start for end, start in zip(ends[:-1], starts[1:], strict=True))
        busy_us = sum(row["dur"] for row in track)
        assert busy_us == pytest.approx(simulated.busy_s[rank] * 1e6, rel=1e-6)
        assert ends[-1] == pytest.approx(max(e.end_s for e in simulated.events if e.rank == rank) * 1e9, abs=1)


def test_a_trace_names_pass_stage_and_micro_batch(tmp_path: Path) -> None:
    write_trace(timeline("dualpipev"), tmp_path / "trace.json")
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    first = min((row for row in rows if row["ph"] == "X" and row["tid"] == 3), key=lambda row: row["ts"])
    assert first["name"] == "forward 0" and first["args"] == {"stage": 3, "micro_batch": 0}
    assert first["ts"] == pytest.approx(3 * 10_100) and first["dur"] == pytest.approx(10_100)
    kinds = {(row["name"], row["args"]["stage"]) for row in rows if row["ph"] == "X" and row["tid"] == 3}
    assert kinds == {(f"{kind} {m}", stage) for kind in ("forward", "backward") for m in range(8) for stage in (3, 4)}


def test_what_runs_beside_the_passes_is_on_tracks_of_its_own(tmp_path: Path) -> None:
    write_trace(timeline(), tmp_path / "trace.json", spans=[Span(2, "all-reduce of gradients", 0.2, 0.25)])
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (span,) = [row for row in rows if row["ph"] == "X" and row["pid"] == 1]
    assert (span["name"], span["tid"], span["ts"], span["dur"]) == ("all-reduce of gradients", 2, 200_000, 50_000)


def pixels(path: Path, colour: str) -> int:
    """How many have just this colour."""
    rgb = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return int(((images.imread(path)[..., :3] * 255).round() == rgb).all(axis=-1).sum())


def test_a_drawing_shows_forward_backward_and_idle_time_in_their_shares(tmp_path: Path) -> None:
    simulated = timeline("1f1b", ranks=4, micro_batches=4)
    plot_timeline(simulated, tmp_path / "schedule.png")
    drawn = tmp_path / "schedule.png"
    forward, backward, idle = (pixels(drawn, colour) for colour in ("#3b75af", "#d9822b", "#e4e4e4"))
    # Edges, numbers and the legend's patches take some; a bubble of 3 / 7 must be near its share.
    assert idle / (forward + backward + idle) == pytest.approx(simulated.mean_bubble, abs=0.03)
    assert backward / forward == pytest.approx(2.01, abs=0.15)


def test_a_long_step_is_drawn_by_its_beginning_and_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr("matplotlib.pyplot.close", drawn.append)
    long, short = timeline(ranks=8, micro_batches=256), timeline()
    plot_timeline(long, tmp_path / "long.png")
    plot_timeline(short, tmp_path / "short.png", spans=[Span(0, "optimizer step", short.step_s, 0.5)])
    monkeypatch.undo()
    (first, last), (whole,) = (figure.axes for figure in drawn)
    assert first.get_xlim()[0] == 0 and last.get_xlim()[1] == pytest.approx(long.step_s)
    assert first.get_xlim()[1] < last.get_xlim()[0]
    assert "0" in {text.get_text() for text in first.texts} and "255" in {text.get_text() for text in last.texts}
    assert whole.get_xlim() == pytest.approx((0, 500)), "in milliseconds, up to the end of the optimizer step"
    title = drawn[1].get_suptitle()
    assert "step 334.4 ms" in title and "mean bubble 27.3%" in title and "imbalance 1.000" in title
    for figure in drawn:
        pyplot.close(figure)
