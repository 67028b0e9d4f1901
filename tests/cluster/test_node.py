"""launch/node.sh, started on each of two hosts as a scheduler does: they meet, train as one rank, and end together."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.cli import compose_config
from conf.load import to_plain
from tests.cluster.hosts import Hosts
from tests.cluster.nodes import Nodes
from tests.cluster.runs import PRETRAIN, SHOWS, TINY, losses, shown
from tests.cluster.test_multinode import AT_MOST
from tests.cluster.test_multinode_words import ENVIRON, OVERRIDES
from tests.engine.launched import events_of, steps_of, wait_for

LONG = [PRETRAIN, *TINY, "parallel=tp1_pp2", "train.train_iters=1000000"]
SLOW = pytest.mark.slow


@pytest.fixture
def start(hosts: Hosts, tmp_path: Path) -> Iterator[object]:
    started: list[Nodes] = []

    def run(*words: list[str], **more: object) -> Nodes:
        started.append(Nodes(hosts, tmp_path, words, **more))
        return started[-1]

    yield run
    hosts.mend()
    for one in started:
        one.end()


@SLOW
def test_two_hosts_train_as_one_rank_does(start, hosts, tmp_path, one_rank):
    nodes = start(*[[PRETRAIN, *TINY, "parallel=tp2_pp2"]] * 2, slots=2)
    assert nodes.wait(240) == [0, 0], nodes.outputs
    assert losses(tmp_path) == pytest.approx(one_rank, abs=AT_MOST)
    assert [path.name for path in (tmp_path / "runs" / "default").iterdir()] == ["r"]
    assert hosts.processes() == []


@SLOW
def test_words_and_each_hosts_own_environment_reach_its_ranks(start, tmp_path):
    words = [word for word in OVERRIDES if word != "run.experiment=waits"]
    (tmp_path / ".deepspeed_env").write_text("# mine\n\nMY_OWN=a b=c $HOME\n")
    nodes = start([SHOWS, *words], ["--node_rank", "1", SHOWS, *words], **ENVIRON)
    assert nodes.wait(180) == [0, 0], nodes.outputs
    for rank, name in ((0, "w0"), (1, "w1")):
        found = shown(tmp_path, rank)
        assert found["host"] == name and found["config"] == to_plain(compose_config([*words, "resume=auto"]))
        for name in ENVIRON.keys() - {"CUDA_VISIBLE_DEVICES"}:
            assert found["environ"][name] == ENVIRON[name]
        assert found["environ"]["MY_OWN"] == "a b=c $HOME"
        assert found["environ"]["GLOO_SOCKET_IFNAME"] == "eth0"
    assert shown(tmp_path, 0)["environ"]["MASTER_ADDR"] == "10.77.0.1"  # its own name is 127.0.1.1 there


@pytest.mark.parametrize(
    ("first", "second", "codes", "line"),
    [
        ([], None, [1], "host w1 (node 1) did not come to port 29500 of w0 within 3 s"),
        pytest.param(None, [], [1], "host w0 (node 0, w0 port 29500) did not answer within 3 s", marks=SLOW),
        ([], ["train.lr=0.1"], [2, 2], "host w1 was started with other overrides or another hostfile than w0"),
    ],
    ids=["second absent", "first absent", "other words"],
)
def test_hosts_that_do_not_meet_are_named_in_bounded_time_and_nothing_starts(
    hosts, tmp_path, first, second, codes, line
):
    words = [None if more is None else ["--wait", "3", SHOWS, "parallel=tp1_pp2", *more] for more in (first, second)]
    began = time.monotonic()
    nodes = Nodes(hosts, tmp_path, words)
    assert nodes.wait(40) == codes, nodes.outputs
    assert all(f"launch/node.sh: {line}" in output for output in nodes.outputs)
    assert time.monotonic() - began < 30 and not list(tmp_path.glob("rank-*"))


def test_two_hosts_that_are_both_told_to_be_the_first_are_named_on_both(hosts, tmp_path):
    nodes = Nodes(hosts, tmp_path, [["--node_rank", "0", "--wait", "60", SHOWS, "parallel=tp1_pp2"]] * 2)
    assert nodes.wait(40) == [2, 2], nodes.outputs
    line = "hosts w0 and w1 both say they are node 0 (w0); give each its own --node_rank, 0 to 1"
    assert all(f"launch/node.sh: {line}" in output for output in nodes.outputs)


def test_a_port_in_use_is_named(hosts, tmp_path):
    """Case F4."""
    listen = "import socket, time; s = socket.create_server(('', 29500)); time.sleep(60)"
    server = hosts[0].start(["python3", "-c", listen], folder=tmp_path, output=tmp_path / "server.txt", environ={})
    try:
        wait_for(lambda: ":29500 " in hosts[0].run(["ss", "-ltn"]), seconds=20, what="the server")
        nodes = Nodes(hosts, tmp_path, [[SHOWS, "parallel=tp1_pp2"], None])
        assert nodes.wait(30) == [2]
        assert (
            "MASTER_PORT=29500 cannot be used here: Address already in use; give all hosts another" in nodes.outputs[0]
        )
    finally:
        for process in hosts.processes():
            process.kill()
        server.wait()


@SLOW
def test_an_address_that_is_not_the_first_hosts_is_told_there_and_not_waited_for_elsewhere(hosts, tmp_path):
    """Case F4."""
    words = ["--wait", "5", SHOWS, "parallel=tp1_pp2"]
    nodes = Nodes(hosts, tmp_path, [words, words], MASTER_ADDR="10.77.0.9")
    began = time.monotonic()
    assert nodes.wait(60) == [2, 1] and time.monotonic() - began < 40, nodes.outputs
    assert "MASTER_ADDR=10.77.0.9 is no address of w0, where rank 0 runs; it has 127.0.0.1, " in nodes.outputs[0]
    assert "host w0 (node 0, 10.77.0.9 port 29500) did not answer within 5 s" in nodes.outputs[1]


@SLOW
def test_a_rank_killed_on_one_host_ends_both_with_one_code(start, hosts, tmp_path):
    nodes = start(LONG, LONG)
    wait_for(lambda: steps_of(tmp_path / "runs" / "default" / "r"), seconds=180, what="a step")
    nodes.rank_on(1).kill()
    codes = nodes.wait(90)
    assert not {0, 2, 75} & set(codes), nodes.outputs
    assert "a rank was lost" in "".join(nodes.outputs)
    assert "launch/node.sh: host w1 ended with code 247: SIGKILL ended a rank there\n" in nodes.outputs[0]
    assert hosts.processes() == []


@SLOW
@pytest.mark.parametrize(
    ("node", "number"), [(0, signal.SIGTERM), (1, signal.SIGUSR1), (1, signal.SIGTERM), (0, signal.SIGINT)]
)
def test_a_request_to_stop_on_one_host_saves_on_all_and_says_75(start, hosts, tmp_path, node, number):
    nodes = start(LONG, LONG)
    run = tmp_path / "runs" / "default" / "r"
    wait_for(lambda: steps_of(run), seconds=180, what="a step")
    hosts[node].signal(nodes.started[node], number)
    assert nodes.wait(90) == [75, 75], nodes.outputs
    saved = [event["step"] for event in events_of(run) if event["event"] == "checkpoint"]
    assert saved[-1:] == steps_of(run)[-1:]
    assert hosts.processes() == []


@SLOW
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_request_to_stop_before_the_first_step_says_75_on_both(start, hosts, tmp_path, number):
    nodes = start(LONG, LONG)
    wait_for((tmp_path / "runs" / "default" / "r" / "metrics.jsonl").exists, seconds=180, what="the run's records")
    hosts[1].signal(nodes.started[1], number)
    assert nodes.wait(90) == [75, 75], nodes.outputs
    assert hosts.processes() == []


@SLOW
@pytest.mark.parametrize("victim", ["node.py", "deepspeed.launcher.launch"])
def test_a_killed_launcher_is_not_success_and_leaves_no_rank(start, hosts, tmp_path, victim):
    nodes = start(LONG, LONG)
    wait_for(lambda: steps_of(tmp_path / "runs" / "default" / "r"), seconds=180, what="a step")
    (process,) = [p for p in hosts[1].processes() if any(word.endswith(victim) for word in p.cmdline())]
    process.kill()
    codes = nodes.wait(120)
    assert 0 not in codes, nodes.outputs
    wait_for(lambda: hosts.processes() == [], seconds=70, what="no process")


@SLOW
def test_a_host_that_is_cut_off_ends_the_run_on_both(start, hosts, tmp_path):
    nodes = start(*[[*LONG, "cluster.hang_timeout_s=15"]] * 2)
    run = tmp_path / "runs" / "default" / "r"
    wait_for(lambda: steps_of(run), seconds=180, what="a step")
    hosts[1].link("down")
    hosts[1].lose(run)
    try:
        assert not {0, 2, 75} & set(nodes.wait(180)), nodes.outputs
        assert "rank 1: no sign of life" in nodes.outputs[0]
        assert hosts.processes() == []
    finally:
        hosts[1].run(["umount", str(run)])
