"""What ends a run over two hosts ends it on both, in bounded time, with a code that says so, and leaves no process."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.hosts import Host, Hosts
from tests.cluster.runs import MULTINODE, PRETRAIN, TINY, environ
from tests.engine.launched import events_of, steps_of, wait_for

HANG_TIMEOUT_S = 15
MARGIN_S = 90  # the watchdog's report, 30 s for the other host, 10 s until ssh gives it up; and a machine in use
LONG = [*TINY, "parallel=tp1_pp2", "train.train_iters=1000000", f"cluster.hang_timeout_s={HANG_TIMEOUT_S}"]


class Training:
    """A run that goes on until something ends it."""

    def __init__(self, hosts: Hosts, folder: Path, *options: str):
        self.hosts, self.folder, self.run = hosts, folder, folder / "runs" / "default" / "r"
        self.process = hosts[0].start(
            [MULTINODE, str(hosts.hostfile(folder / "hostfile")), *options, PRETRAIN, *LONG],
            folder=folder, output=folder / "output.txt", environ=environ(hosts),
        )  # fmt: skip

    def wait_for_steps(self) -> None:
        try:
            wait_for(lambda: steps_of(self.run) or self.process.poll() is not None, seconds=180, what="a step")
            assert self.process.poll() is None
        except AssertionError as error:
            raise AssertionError(self.output) from error

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(self.output) from error

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    def rank_on(self, host: Host) -> psutil.Process:
        (found,) = [process for process in host.processes() if "--local_rank=0" in process.cmdline()]
        return found


@pytest.fixture
def training(hosts: Hosts, tmp_path: Path) -> Iterator[Training]:
    started = Training(hosts, tmp_path)
    yield started
    hosts.mend()
    for process in hosts.processes():
        process.kill()
    started.process.wait()


def test_a_rank_killed_on_the_second_host_ends_the_run_on_both(training, hosts):
    training.wait_for_steps()
    training.rank_on(hosts[1]).kill()
    assert training.wait(90) not in (0, 2, 75)
    assert "a rank was lost" in training.output
    assert "w1: ssh exited with exit code 247" in training.output
    assert hosts.processes() == []


@pytest.mark.slow
def test_a_host_that_is_cut_off_is_named_and_the_run_ends_everywhere(training, hosts):
    training.wait_for_steps()
    hosts[1].link("down")
    hosts[1].lose(training.run)
    assert training.wait(HANG_TIMEOUT_S + MARGIN_S) not in (0, 2, 75)
    assert json.loads((training.run / "failed.json").read_text())["rank"] == 1
    assert "rank 1: no sign of life" in training.output
    assert "host w1: ssh does not reach it" in training.output
    assert hosts[0].processes() == []
    wait_for(lambda: hosts[1].processes() == [], seconds=HANG_TIMEOUT_S + 60, what="the cut host's end")


@pytest.mark.slow
def test_a_killed_launcher_is_told_and_is_no_success(training, hosts):
    training.wait_for_steps()
    (runner,) = [one for one in hosts[0].processes() if any(word.endswith("bin/deepspeed") for word in one.cmdline())]
    runner.kill()
    assert training.wait(90) == 1
    assert "launch/multinode.sh: deepspeed was ended by SIGKILL here" in training.output
    assert hosts.processes() == []


SLOW = [pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGUSR1, signal.SIGTERM)]


@pytest.mark.parametrize("number", [signal.SIGINT, *SLOW])
def test_a_request_to_stop_saves_on_all_hosts_and_says_75(training, hosts, number):
    training.wait_for_steps()
    hosts[0].signal(training.process, number)
    assert training.wait(90) == 75, training.output
    saved = [event["step"] for event in events_of(training.run) if event["event"] == "checkpoint"]
    assert saved[-1:] == steps_of(training.run)[-1:]
    assert hosts.processes() == []


@pytest.mark.slow
def test_a_second_request_ends_it_at_once(training, hosts):
    training.wait_for_steps()
    hosts[0].signal(training.process, signal.SIGTERM)
    time.sleep(1.5)
    hosts[0].signal(training.process, signal.SIGTERM)
    assert training.wait(60) in (75, 143), training.output  # the first may have been served meanwhile
    assert hosts.processes() == []
