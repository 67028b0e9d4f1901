"""Which network, address and port a run over two hosts takes, and what is refused before anything starts."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.runs import MULTINODE, SHOWS, environ, finish, shown
from tests.engine.launched import wait_for

PLAN = "parallel=tp1_pp2"


@pytest.fixture(scope="module")
def two_networks(allowed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Hosts whose names are on the first of two networks."""
    with Hosts(2, tmp_path_factory.mktemp("networks") / "hosts", networks=2) as made:
        yield made


def test_a_named_interface_gives_the_address_and_the_transport_on_every_host(two_networks, tmp_path):
    hostfile = str(two_networks.hostfile(tmp_path / "hosts"))
    command = [MULTINODE, hostfile, "--interface", "eth1", SHOWS, PLAN]
    code, output = finish(two_networks[0], command, tmp_path, environ(two_networks, NCCL_SOCKET_IFNAME="other"))
    assert code == 0, output
    for rank in (0, 1):
        given = shown(tmp_path, rank)["environ"]
        assert given["MASTER_ADDR"] == "10.77.1.1"
        assert given["GLOO_SOCKET_IFNAME"] == given["NCCL_SOCKET_IFNAME"] == "eth1"


@pytest.mark.parametrize(
    ("options", "given", "line"),
    [
        (["--interface", "ib0"], {}, "host w0: it has no interface ib0 with an address; it has eth0, eth1, lo"),
        ([], {"MASTER_ADDR": "10.9.9.9"}, "MASTER_ADDR=10.9.9.9 is no address of w0, where rank 0 runs; it has "),
        ([], {"MASTER_PORT": "29555"}, "host w0: MASTER_PORT=29555 cannot be used: Address already in use; unset it"),
        (["-p", "2222"], {}, "host w1: ssh does not reach it: ssh: connect to host w1 port 2222: Connection refused"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told_by_host_in_seconds(two_networks, tmp_path, options, given, line):
    server = two_networks[0].start(
        ["python3", "-m", "http.server", "29555"],
        folder=tmp_path, output=tmp_path / "server.txt", environ=environ(two_networks),
    )  # fmt: skip
    try:
        wait_for(lambda: ":29555 " in two_networks[0].run(["ss", "-ltn"]), seconds=20, what="the server")
        command = [MULTINODE, str(two_networks.hostfile(tmp_path / "hosts")), *options, SHOWS, PLAN]
        code, output = finish(two_networks[0], command, tmp_path, environ(two_networks, **given), timeout=30)
    finally:
        for process in two_networks[0].processes():
            process.kill()
        server.wait()
    assert code == 2 and line in output
    assert not list(tmp_path.glob("rank-*"))


@pytest.mark.slow
def test_a_hostfile_of_one_other_host_runs_there_and_not_here(hosts, tmp_path):
    (tmp_path / "hosts").write_text("w0 slots=2\nw1 slots=2\n")
    command = [MULTINODE, "hosts", "-i", "w1", SHOWS, PLAN]
    code, output = finish(hosts[0], command, tmp_path, environ(hosts))
    assert code == 0, output
    assert [(shown(tmp_path, rank)["host"], shown(tmp_path, rank)["of"]) for rank in (0, 1)] == [("w1", 2), ("w1", 2)]


def test_a_host_that_is_not_there_is_named(two_networks, tmp_path):
    (tmp_path / "hosts").write_text("w0 slots=1\nw7 slots=1\n")
    code, output = finish(two_networks[0], [MULTINODE, "hosts", SHOWS, PLAN], tmp_path, environ(two_networks))
    assert code == 2 and "host w7: ssh does not reach it: ssh: Could not resolve hostname w7" in output


def test_a_folder_that_a_host_does_not_share_is_named(two_networks, tmp_path):
    here = tmp_path / "shared"
    here.mkdir()
    two_networks[1].lose(tmp_path)
    try:
        hostfile = str(two_networks.hostfile(here / "hosts"))
        code, output = finish(two_networks[0], [MULTINODE, hostfile, SHOWS, PLAN], here, environ(two_networks))
    finally:
        two_networks[1].run(["umount", str(tmp_path)])
    assert code == 2 and f"host w1: it has no folder {here}; the hosts must share the folder" in output


@pytest.mark.slow
def test_a_given_free_port_is_taken_and_a_host_may_be_named_with_its_user(two_networks, tmp_path):
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    (tmp_path / "hosts").write_text("root@w0 slots=1 # the first\r\n\r\n\troot@w1\tslots=1 max_slots=2\r\n")
    given = environ(two_networks, MASTER_PORT=port, MASTER_ADDR="10.77.1.1")
    code, output = finish(two_networks[0], [MULTINODE, "hosts", SHOWS, PLAN], tmp_path, given)
    assert code == 0, output
    assert [shown(tmp_path, rank)["host"] for rank in (0, 1)] == ["w0", "w1"]
    for rank in (0, 1):
        found = shown(tmp_path, rank)["environ"]
        assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.77.1.1", port)


def test_an_address_that_another_host_does_not_reach_is_told(two_networks, tmp_path):
    two_networks[1].run(["ip", "route", "add", "prohibit", "10.77.1.1/32"])
    try:
        given = environ(two_networks, MASTER_ADDR="10.77.1.1", MASTER_PORT="29556")
        command = [MULTINODE, str(two_networks.hostfile(tmp_path / "hosts")), SHOWS, PLAN]
        code, output = finish(two_networks[0], command, tmp_path, given)
    finally:
        two_networks[1].run(["ip", "route", "del", "prohibit", "10.77.1.1/32"])
    assert code == 2 and "host w1: it does not reach rank 0's 10.77.1.1 port 29556 (" in output


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["pdsh", "openmpi"])
def test_two_launches_at_once_on_the_same_hosts_do_not_meet(hosts, tmp_path, launcher):
    """Case F4."""
    started, folders = [], [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        command = [MULTINODE, str(hosts.hostfile(folder / "hosts")), "--launcher", launcher, SHOWS, PLAN]
        command.append(f"run.experiment={folder.name}")
        started.append(hosts[0].start(command, folder=folder, output=folder / "output.txt", environ=environ(hosts)))
    assert [process.wait(timeout=120) for process in started] == [0, 0]
    found = [shown(folder, 1) for folder in folders]
    assert [one["config"]["run"]["experiment"] for one in found] == ["a", "b"]
    assert found[0]["environ"]["MASTER_PORT"] != found[1]["environ"]["MASTER_PORT"]


def test_one_host_under_two_names_is_refused(hosts, tmp_path):
    """Each host has one part of a launch, and one environment file."""
    (tmp_path / "twice").write_text("w0 slots=1\n10.77.0.1 slots=1\n")
    code, output = finish(hosts[0], [MULTINODE, "twice", SHOWS, "parallel=tp1"], tmp_path, environ(hosts))
    assert code == 2 and "host 10.77.0.1: it is w0 under another name; give all its slots in one line" in output


def test_a_folder_of_runs_that_a_host_does_not_share_is_told_before_anything_starts(two_networks, tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    two_networks[1].lose(runs)
    try:
        command = [MULTINODE, str(two_networks.hostfile(tmp_path / "hosts")), SHOWS, PLAN]
        code, output = finish(two_networks[0], command, tmp_path, environ(two_networks), timeout=60)
    finally:
        two_networks[1].run(["umount", str(runs)])
    line = f"host w1: its {runs}, where the runs are kept, is not the launcher's; mount the shared disk there"
    assert code == 2 and line in output
    assert list(runs.iterdir()) == [] and not list(tmp_path.glob("rank-*"))
