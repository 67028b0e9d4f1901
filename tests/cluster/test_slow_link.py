"""A host whose link is slow slows the run down; it is not taken for a lost one, and telemetry says what is slow."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.runs import BIN, MULTINODE, TINY, environ, losses
from tests.engine.launched import FAULTY, events_of, steps_of, wait_for
from tests.engine.launched import finish as finish_here

AT_MOST = 1e-5  # fp32: sums in another order
FAST, STEPS = 15, 40  # steps before the link gets slow, and in all
KILOBITS = 8000  # a second; a step sends about 1.4 MB to the host, and takes 0.2 s without
TRAINED = [
    *TINY, f"train.train_iters={STEPS}", "parallel=tp1", "zero=stage1", "telemetry.ranks_interval=5",
    "alerts.throughput_drop.normal.window=10", "cluster.hang_timeout_s=20",
]  # fmt: skip


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_run_over_a_slow_link_goes_on_slower_to_the_same_losses_and_an_alert_is_raised(hosts: Hosts, tmp_path: Path):
    alone = tmp_path / "alone"
    alone.mkdir()
    code, output = finish_here([str(BIN / "python"), str(FAULTY), *TRAINED], alone, FAULT="none", OMP_NUM_THREADS="1")
    assert code == 0, output
    (tmp_path / ".deepspeed_env").write_text("FAULT=slow\nSLOW_S=0.2\n")
    hosts.hostfile(tmp_path / "hostfile")
    command = [MULTINODE, "hostfile", "--lost-after", "10", str(FAULTY), *TRAINED]
    output_file, run = tmp_path / "output.txt", tmp_path / "runs" / "default" / "r"
    started = hosts[0].start(command, folder=tmp_path, output=output_file, environ=environ(hosts))
    try:
        wait_for(lambda: FAST in steps_of(run) or started.poll() is not None, seconds=180, what="fast steps")
        hosts[1].rate(KILOBITS)
        assert started.wait(timeout=400) == 0, output_file.read_text()
    finally:
        hosts[1].rate(None)
        started.wait()
    assert losses(tmp_path) == pytest.approx(losses(alone), abs=AT_MOST)
    steps = [row for row in rows(run / "metrics.jsonl") if "train/loss" in row]
    seconds = {row["step"]: row["train/step_time_s"] for row in steps}
    fast, slow = (
        [s for step, s in seconds.items() if low < step <= high] for low, high in ((3, FAST), (FAST + 2, STEPS))
    )
    assert median(slow) > 2 * median(fast)
    ranks = {row["step"]: row["ranks"] for row in rows(run / "ranks.jsonl")}
    for before, after in zip(ranks[10], ranks[STEPS], strict=True):  # by rank: both wait, on the data axis
        assert after["communication_s"] > 0.6 * after["step_s"] and before["communication_s"] < 0.4 * before["step_s"]
        assert all(name.startswith("data/") for name in after["collectives"])
    assert "throughput_drop" in [event["alert"] for event in events_of(run) if event["event"] == "alert raised"]
    assert hosts.processes() == []
