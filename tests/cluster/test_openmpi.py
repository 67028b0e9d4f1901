"""launch/multinode.sh --launcher openmpi: mpirun starts the ranks, and what pdsh's promise is holds with it too.

Words, environment and secrets: test_multinode_words.py, for both launchers.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.runs import MULTINODE, PRETRAIN, SHOWS, TINY, environ, finish, losses, shown
from tests.cluster.test_multinode_faults import Training
from tests.engine.launched import events_of, steps_of

AT_MOST = 1e-5  # fp32: sums in another order
OPENMPI = ["--launcher", "openmpi"]


def test_ranks_are_in_the_hostfiles_order_on_the_slots_that_were_chosen(hosts: Hosts, tmp_path: Path) -> None:
    """mpirun itself would begin with the host that it runs on."""
    (tmp_path / "hosts").write_text("w1 slots=3\nw0 slots=2\n")
    command = [MULTINODE, "hosts", *OPENMPI, "-e", "w1:1", "--interface", "eth0", SHOWS, "parallel=tp1"]
    code, output = finish(hosts[0], command, tmp_path, environ(hosts))
    assert code == 0, output
    ranks = [shown(tmp_path, rank) for rank in range(4)]
    assert [rank["host"] for rank in ranks] == ["w1", "w1", "w0", "w0"]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CUDA_VISIBLE_DEVICES", "MASTER_ADDR")
    assert [[rank["environ"][name] for name in names] for rank in ranks] == [
        ["0", "0", "4", "2", "0,2", "10.77.0.2"],
        ["1", "1", "4", "2", "0,2", "10.77.0.2"],
        ["2", "0", "4", "2", "0,1", "10.77.0.2"],
        ["3", "1", "4", "2", "0,1", "10.77.0.2"],
    ]
    assert hosts.processes() == []


def test_it_trains_over_two_hosts_as_one_rank_does(hosts: Hosts, tmp_path: Path, one_rank: list[float]) -> None:
    hostfile = str(hosts.hostfile(tmp_path / "hostfile", slots=2))
    command = [MULTINODE, hostfile, *OPENMPI, PRETRAIN, *TINY, "parallel=tp2_pp2"]
    code, output = finish(hosts[0], command, tmp_path, environ(hosts))
    assert code == 0, output
    assert losses(tmp_path) == pytest.approx(one_rank, abs=AT_MOST)
    assert hosts.processes() == []


@pytest.fixture
def training(hosts: Hosts, tmp_path: Path) -> Iterator[Training]:
    started = Training(hosts, tmp_path, *OPENMPI)
    yield started
    for process in hosts.processes():
        process.kill()
    started.process.wait()


def test_a_killed_rank_ends_the_run_on_both_hosts_and_is_named(training: Training, hosts: Hosts) -> None:
    """Case F5."""
    training.wait_for_steps()
    training.rank_on(hosts[1]).kill()
    assert training.wait(90) not in (0, 2, 75)
    assert "a rank was lost" in training.output and "rank 1 on w1 ended with code 137" in training.output
    assert hosts.processes() == []


@pytest.mark.slow
def test_a_killed_starter_of_a_rank_ends_the_run_on_both_hosts(training: Training, hosts: Hosts) -> None:
    """mpirun sees that one itself, and ends the others."""
    training.wait_for_steps()
    parent = training.rank_on(hosts[1]).parent()
    assert parent is not None and "openmpi_rank.sh" in " ".join(parent.cmdline())
    parent.kill()
    assert training.wait(90) not in (0, 2, 75)
    assert hosts.processes() == []


@pytest.mark.slow
def test_a_killed_mpirun_is_told_and_is_no_success(training: Training, hosts: Hosts) -> None:
    training.wait_for_steps()
    (mpirun,) = [one for one in hosts[0].processes() if one.name() == "mpirun"]
    mpirun.kill()
    assert training.wait(90) == 1
    assert "launch/multinode.sh: mpirun was ended by SIGKILL here" in training.output
    assert hosts.processes() == []


@pytest.mark.slow
def test_a_request_to_stop_saves_on_all_hosts_and_says_75(training: Training, hosts: Hosts) -> None:
    training.wait_for_steps()
    hosts[0].signal(training.process, signal.SIGINT)
    assert training.wait(90) == 75, training.output
    saved = [event["step"] for event in events_of(training.run) if event["event"] == "checkpoint"]
    assert saved[-1:] == steps_of(training.run)[-1:]
    assert hosts.processes() == []


@pytest.mark.slow
def test_what_the_ranks_refuse_is_code_2(hosts: Hosts, tmp_path: Path) -> None:
    """The run's folder is another's: known on rank 0 alone."""
    (tmp_path / "runs" / "default" / "r").mkdir(parents=True)
    hostfile = str(hosts.hostfile(tmp_path / "hostfile"))
    command = [MULTINODE, hostfile, *OPENMPI, PRETRAIN, *TINY, "parallel=tp1_pp2", "resume=never"]
    code, output = finish(hosts[0], command, tmp_path, environ(hosts))
    assert code == 2 and "is another run's" in output
    assert hosts.processes() == []
