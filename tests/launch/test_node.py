"""launch/node.sh up to where it starts DeepSpeed's launcher: which host it is, whom it meets, what it refuses."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from conf.load import ConfigError
from launch import meeting, node

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "node.sh"
HOSTS = "w0 slots=2\nw1 slots=2\n"


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """(code, stdout, stderr) of a dry run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DRY_RUN", "1")
    for name in ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "SLURM_STEP_TASKS_PER_NODE", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str, hosts: str = HOSTS) -> tuple[int, str, str]:
        (tmp_path / "hosts").write_text(hosts)
        monkeypatch.setattr("sys.argv", ["node.py", *arguments])
        code = node.main()
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_a_dry_run_prints_both_commands(tmp_path):
    (tmp_path / "hosts").write_text(HOSTS)
    done = subprocess.run(
        [SCRIPT, "hosts", "--node_rank", "1", "recipes/pretrain.py", "parallel=tp2", "telemetry.wandb.tags=[a b]"],
        cwd=tmp_path, env=os.environ | {"DRY_RUN": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    each, command = done.stdout.splitlines()
    assert each.startswith("node 1 of w0, w1, 4 ranks, each: ")
    assert each.endswith("recipes/pretrain.py parallel=tp2 'telemetry.wandb.tags=[a b]' resume=auto")
    assert "--no_ssh --node_rank 1 --master_addr w0 --master_port 29500 --no_python" in command


def test_a_host_is_found_by_slurms_name_its_own_or_an_address(call, monkeypatch):
    mine = socket.gethostname()
    for hosts in (f"w0 slots=2\nme@{mine} slots=2\n", "w0 slots=2\n127.0.0.1 slots=2\n"):
        assert call("hosts", "recipes/pretrain.py", hosts=hosts)[1].startswith("node 1 of ")
    monkeypatch.setenv("SLURMD_NODENAME", "w1")
    assert call("hosts", "recipes/pretrain.py")[1].startswith("node 1 of ")


@pytest.mark.parametrize(
    ("arguments", "environ", "line"),
    [
        (["hosts"], {}, "usage: launch/node.sh HOSTFILE"),
        (["hosts", "-p", "22", "recipes/pretrain.py"], {}, "-p 22: no ssh is used here"),
        (["hosts", "--node_rank", "x", "recipes/pretrain.py"], {}, "--node_rank x is not a number"),
        (["hosts", "--node_rank", "2", "recipes/pretrain.py"], {}, "--node_rank 2: w0, w1 are 0 to 1"),
        (["hosts", "--wait", "long", "recipes/pretrain.py"], {}, "--wait long is not a number of seconds"),
        (["hosts", "recipes/pretrain.py"], {}, "which of w0, w1 is "),
        (["hosts", "recipes/pretrain.py"], {"MASTER_PORT": "x"}, "MASTER_PORT=x is not a port"),
        (["hosts", "recipes/pretrain.py"], {"MASTER_ADDR": ""}, "MASTER_ADDR is empty"),
        (["hosts", "recipes/pretrain.py", "parallel.tp=3"], {}, "does not divide the 4 slots"),
        (
            ["hosts", "--node_rank", "0", "recipes/pretrain.py"],
            {"CUDA_VISIBLE_DEVICES": "4", "DS_ACCELERATOR": "cuda"}, "slot 1 but CUDA_VISIBLE_DEVICES=4 shows 1 GPUs",
        ),
        (
            ["hosts", "--node_rank", "0", "recipes/pretrain.py"], {"SLURM_STEP_TASKS_PER_NODE": "8(x2)"},
            "srun started 8(x2) tasks a host and each would start all ranks of it",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_ends_with_code_2_and_a_line(call, monkeypatch, arguments, environ, line):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    code, out, err = call(*arguments)
    assert code == 2 and out == "" and line in err and len(err.splitlines()) == 1


def test_slots_count_the_gpus_that_this_host_shows():
    assert node.devices([0, 2], {"CUDA_VISIBLE_DEVICES": "4,5,GPU-6"}) == ["env", "CUDA_VISIBLE_DEVICES=4,GPU-6"]
    assert node.devices([0, 1], {}) == node.devices([0, 1], {"CUDA_VISIBLE_DEVICES": ""}) == []


class Launchers:
    """The launchers of hosts h0, h1, ... as threads: each one's Met, or what it raised."""

    def __init__(self, count: int):
        self.hosts = [f"h{number}" for number in range(count)]
        self.found: dict[int, meeting.Met | Exception] = {}
        self.threads: list[threading.Thread] = []
        with socket.socket() as probe:
            probe.bind(("", 0))
            self.port = probe.getsockname()[1]

    def start(self, number: int, *, words: str = "same", seconds: float = 10.0) -> None:
        def meet() -> None:
            try:
                if number == 0:
                    at = {"address": "127.0.0.1", "port": self.port}
                    met = meeting.gather(self.hosts, words=words, seconds=seconds, **at)
                else:
                    at = {"address": "127.0.0.1", "port": self.port}
                    met = meeting.join(self.hosts, number, words=words, seconds=seconds, **at)
                self.found[number] = met
            except (meeting.AbsentError, ConfigError) as error:
                self.found[number] = error

        self.threads.append(threading.Thread(target=meet))
        self.threads[-1].start()

    def wait(self) -> list[meeting.Met | Exception]:
        for thread in self.threads:
            thread.join(timeout=30)
        return [self.found[number] for number in sorted(self.found)]


def test_hosts_meet_in_any_order_and_a_stranger_does_not_disturb():
    launchers = Launchers(3)
    launchers.start(2)
    time.sleep(0.3)
    launchers.start(0)
    deadline = time.monotonic() + 10
    while True:
        try:
            stranger = socket.create_connection(("127.0.0.1", launchers.port), timeout=1)
            break
        except OSError:
            assert time.monotonic() < deadline
    stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
    launchers.start(1)
    found = launchers.wait()
    assert [one.node for one in found] == [0, 1, 2]
    assert found[0].addresses() == found[1].addresses() == ["127.0.0.1"]
    stranger.close()


def test_who_does_not_come_is_named_to_all():
    launchers = Launchers(3)
    launchers.start(0, seconds=1.0)
    launchers.start(1, seconds=10.0)
    lines = [str(one) for one in launchers.wait()]
    assert lines == [f"host h2 (node 2) did not come to port {launchers.port} of h0 within 1 s"] * 2


def test_the_first_host_that_does_not_come_is_named():
    launchers = Launchers(2)
    launchers.start(1, seconds=1.0)
    (error,) = launchers.wait()
    assert f"host h0 (node 0, 127.0.0.1 port {launchers.port}) did not answer within 1 s" in str(error)


def test_other_words_and_a_rank_twice_are_refused_on_every_host():
    launchers = Launchers(2)
    launchers.start(0)
    launchers.start(1, words="other")
    lines = {str(one) for one in launchers.wait()}
    assert lines == {"host h1 was started with other overrides or another hostfile than h0"}
    launchers = Launchers(3)
    for number in (0, 1, 1):
        launchers.start(number)
    assert "two hosts say they are node 1 (h1)" in {str(one) for one in launchers.wait()}.pop()


def test_another_host_that_says_it_is_the_first_is_told_with_its_name_on_both():
    launchers = Launchers(2)
    launchers.start(0)
    deadline = time.monotonic() + 10
    while True:
        try:
            other = socket.create_connection(("127.0.0.1", launchers.port), timeout=5)
            break
        except OSError:
            assert time.monotonic() < deadline
    other.sendall(b'{"node": 0, "words": "same", "name": "w1", "token": "another"}\n')
    line = f"hosts {socket.gethostname()} and w1 both say they are node 0 (h0); give each its own --node_rank, 0 to 1"
    with other.makefile() as said:
        assert json.loads(said.readline()) == {"refused": line}
    assert [str(one) for one in launchers.wait()] == [line]
    other.close()


def ended(launchers: Launchers, *codes: int | None) -> list[int]:
    """Each host's verdict after its launcher ended with that code, one after the other; None: it is killed."""
    for number in range(len(codes)):
        launchers.start(number)
    found = launchers.wait()
    verdicts: dict[int, int] = {}

    def end(number: int, code: int) -> None:
        verdicts[number] = found[number].end(code, patience_s=5.0)

    threads = []
    for number, code in enumerate(codes):
        if code is None:
            for link in found[number].links.values():
                link.shutdown(socket.SHUT_RDWR)
            continue
        threads.append(threading.Thread(target=end, args=(number, code)))
        threads[-1].start()
    for thread in threads:
        thread.join(timeout=20)
    return [verdicts[number] for number in sorted(verdicts)]


@pytest.mark.parametrize(
    ("codes", "verdicts"),
    [((0, 0, 0), [0] * 3), ((3, 0, 0), [3] * 3), ((0, 0, 75), [75] * 3), ((0, None), [1]), ((None, 0), [1])],
)
def test_all_hosts_come_to_one_verdict(codes, verdicts):
    assert ended(Launchers(len(codes)), *codes) == verdicts


def test_a_failure_is_known_to_all_others_by_host_and_code():
    launchers = Launchers(3)
    for number in range(3):
        launchers.start(number)
    found = launchers.wait()
    found[1].end(247, patience_s=5.0)
    failures = [found[number].first_failure(patience_s=5.0) for number in (0, 2)]
    assert {(failure.host, failure.code) for failure in failures} == {("h1", 247)}
    assert found[1].first_failure(patience_s=1.0) is None
