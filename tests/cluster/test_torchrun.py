"""torchrun over two hosts, which meet through its c10d rendezvous, as the Kubeflow operators start it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.runs import BIN, TINY, environ
from tests.engine.launched import FAULTY, events_of

AT_MOST = 1e-5  # fp32: sums in another order
PORT = 34400  # of rank 0's host, which serves nothing else


def torchrun(hosts: Hosts, folder: Path, options: Sequence[str], words: Sequence[str], **more: str) -> list[int]:
    """The exit codes of both hosts' torchrun, which leave no process; their output is in output-N.txt."""
    command = [str(BIN / "torchrun"), "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    command += ["--rdzv-id", folder.name, "--rdzv-endpoint", f"w0:{PORT}", *options, str(FAULTY), *TINY, *words]
    variables = environ(hosts, GLOO_SOCKET_IFNAME="eth0", **more)
    started = [
        host.start(command, folder=folder, output=folder / f"output-{number}.txt", environ=variables)
        for number, host in enumerate([hosts[0], hosts[1]])
    ]
    try:
        codes = [one.wait(timeout=240) for one in started]
        assert hosts.processes() == []
        return codes
    finally:
        for process in hosts.processes():
            process.kill()


def output(folder: Path) -> str:
    return "".join((folder / f"output-{number}.txt").read_text() for number in range(2))


def test_a_killed_rank_is_named_and_the_restarted_group_goes_on_with_the_same_run(
    hosts: Hosts, tmp_path: Path, one_rank: list[float]
) -> None:
    fault = {"FAULT": "kill", "FAULT_RANK": "1", "FAULT_STEP": "3", "FAULT_ONCE": str(tmp_path / "once")}
    fault["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    words = ["parallel=tp1_pp2", "resume=auto", "checkpoint.interval=1"]
    codes = torchrun(hosts, tmp_path, ["--max-restarts", "1"], words, **fault)
    assert codes == [0, 0], output(tmp_path)
    assert "exitcode: -9" in output(tmp_path)
    (run,) = (tmp_path / "runs" / "default").iterdir()
    assert run.name == "r" and (run / "complete.json").exists()
    (resumed,) = [event["step"] for event in events_of(run) if event["event"] == "resume"]
    assert resumed in (1, 2)  # the checkpoint of step 2 may have been under way
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}  # the later one counts
    assert list(losses.values()) == pytest.approx(one_rank, abs=AT_MOST)


@pytest.mark.slow
def test_without_restarts_a_killed_rank_ends_both_hosts_and_the_failure_names_host_and_rank(
    hosts: Hosts, tmp_path: Path
) -> None:
    """Case F5."""
    fault = {"FAULT": "kill", "FAULT_RANK": "1", "FAULT_STEP": "2"}
    codes = torchrun(hosts, tmp_path, [], ["parallel=tp1_pp2", "cluster.hang_timeout_s=15"], **fault)
    assert codes == [1, 1], output(tmp_path)
    said = (tmp_path / "output-1.txt").read_text()
    assert "host      : w1" in said and "rank      : 1 (local_rank: 0)" in said and "exitcode  : -9" in said
    failed = json.loads((tmp_path / "runs" / "default" / "r" / "failed.json").read_text())
    assert "a peer of rank 0 died" in json.dumps(failed)


@pytest.mark.slow
def test_a_bad_configuration_ends_both_hosts_with_its_line(hosts: Hosts, tmp_path: Path) -> None:
    codes = torchrun(hosts, tmp_path, [], ["parallel=tp1_pp2", "train.lr=-1"], FAULT="slow")
    assert codes == [1, 1] and output(tmp_path).count("error: train.lr=-1 must be positive") == 1
    assert "exitcode  : 2" in output(tmp_path)
