"""A host that dies in a run with restarts: what is left goes on, from the last checkpoint, to the same numbers."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.hosts import Host, Hosts
from tests.cluster.runs import BIN, MULTINODE, PRETRAIN, SHOWS, TINY, environ, losses
from tests.engine.launched import FAULTY, events_of, steps_of, wait_for
from tests.engine.launched import finish as finish_here

AT_MOST = 1e-5  # fp32: sums in another order
STEPS = 12
TRAINED = [*TINY, f"train.train_iters={STEPS}", "checkpoint.interval=4", "checkpoint.asynchronous=false"]
SLOW = {"FAULT": "slow", "SLOW_S": "1"}
LOST_AFTER_S = 8
ENDS_S = LOST_AFTER_S + 10 + 10 + 10  # until ssh gives the lost host up and ranks are killed; and a machine in use
ALONE_S = LOST_AFTER_S + LOST_AFTER_S + 10 + 10  # the guard's patience, its ranks' last words, and as above
RATES = [  # of some cluster, so that the planner can choose
    "cluster=epyc_zen2_2cores", "cluster.nodes=4", "cluster.devices_per_node=1",
    "cluster.inter_node={name: Ethernet, bandwidth: 1e9, latency_s: 1e-4}",
]  # fmt: skip


@pytest.fixture(scope="module")
def four(allowed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(4, tmp_path_factory.mktemp("restarts") / "hosts") as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[float]:
    folder = tmp_path_factory.mktemp("one-rank")
    code, output = finish_here([str(BIN / "python"), PRETRAIN, *TRAINED], folder, OMP_NUM_THREADS="1")
    assert code == 0, output
    return losses(folder)


class Training:
    """A run over the hosts named, started from one of them."""

    def __init__(
        self, hosts: Hosts, folder: Path, names: str, *options: str, fault: dict[str, str], caller: int, plan: list[str]
    ):
        self.hosts, self.folder, self.run = hosts, folder, folder / "runs" / "default" / "r"
        (folder / "hostfile").write_text("".join(f"{name} slots=1\n" for name in names.split()))
        (folder / ".deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in fault.items()))
        self.process = hosts[caller].start(
            [MULTINODE, "hostfile", *options, str(FAULTY), *TRAINED, *plan],
            folder=folder, output=folder / "output.txt", environ=environ(hosts),
        )  # fmt: skip

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    def wait_for(self, condition: Callable[[], Any], *, seconds: float, what: str) -> None:
        try:
            wait_for(lambda: condition() or self.process.poll() is not None, seconds=seconds, what=what)
            assert condition(), what
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from error

    def wait_for_a_checkpoint(self) -> None:
        self.wait_for(lambda: (self.run / "checkpoints" / "step-00000004").exists(), seconds=180, what="a checkpoint")

    def wait(self, seconds: float) -> int:
        self.wait_for(lambda: self.process.poll() is not None, seconds=seconds, what="its end")
        return self.process.returncode

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in events_of(self.run) if event["event"] == name]

    def losses_as_they_count(self) -> list[float]:
        """Of each step the last time it was trained."""
        rows = map(json.loads, (self.run / "metrics.jsonl").read_text().splitlines())
        found = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
        return [found[step] for step in sorted(found)]

    def resumed(self) -> list[int]:
        """The steps that it went on from; at +1, and every later one was trained."""
        steps, found = steps_of(self.run), [event["step"] for event in self.events("resume")]
        assert steps[-(STEPS - found[-1]) :] == list(range(found[-1] + 1, STEPS + 1))
        return found


def ranks_on(host: Host) -> list[psutil.Process]:
    found = []
    for process in host.processes():
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            found += [process] if "--local_rank=0" in process.cmdline() else []
    return found


@pytest.fixture
def train(four: Hosts, tmp_path: Path) -> Iterator[Callable[..., Training]]:
    started: list[Training] = []

    def start(names: str, *options: str, fault: dict[str, str], plan: list[str], caller: int = 0) -> Training:
        started.append(Training(four, tmp_path, names, *options, fault=fault, caller=caller, plan=plan))
        return started[-1]

    yield start
    four.mend()
    for process in four.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for training in started:
        training.process.wait()


def restart_of(training: Training, number: int) -> dict[str, Any]:
    """What the timeline and starts/N.json say of it, which is the same."""
    event = training.events("restart")[number - 1]
    start = training.run / "starts" / f"{number + 1}.json"
    kept: dict[str, Any] = json.loads(start.read_text())["identity"]["restart"]
    assert {name: event[name] for name in kept} == kept and kept["number"] == number
    return kept


def test_a_killed_rank_is_restarted_on_the_spare_host_from_the_last_checkpoint(train, four, undisturbed, tmp_path):
    once = {"FAULT": "kill", "FAULT_STEP": "6", "FAULT_RANK": "1", "FAULT_ONCE": str(tmp_path / "struck")}
    training = train("w0 w1 w2", "--hosts", "2", "-r", "1", fault=once, plan=["parallel=tp1_pp2"])
    assert training.wait(240) == 0, training.output
    assert "restart 1 on w0, w2: tp1_pp2_dp1_zero1, as configured" in training.output
    assert training.resumed() == [4]
    assert training.losses_as_they_count() == pytest.approx(undisturbed, abs=AT_MOST)
    record = restart_of(training, 1)
    assert record["reason"] == "host w1 (rank 1) ended with code 247: SIGKILL ended a rank there"
    assert (record["hosts_before"], record["hosts"]) == ({"w0": 1, "w1": 1}, {"w0": 1, "w2": 1})
    assert record["failed"] == ["w1"] and record["plan"] == record["plan_before"]
    assert four.processes() == []


@pytest.mark.slow
@pytest.mark.parametrize(("cut", "left"), [(1, "w0, w2"), (0, "w1, w2")])
def test_a_host_that_is_cut_off_ends_everywhere_in_time_and_a_spare_goes_on(train, four, undisturbed, cut, left):
    """Called from w3. The lost host may have rank 0, which holds the run's folder as long as it lives."""
    options = ["--hosts", "2", "-r", "1", "--lost-after", str(LOST_AFTER_S)]
    training = train("w0 w1 w2", *options, fault=SLOW, plan=["parallel=tp1_pp2"], caller=3)
    training.wait_for_a_checkpoint()
    four[cut].link("down")
    began, other = time.monotonic(), four[1 - cut]
    first = {process.pid for process in ranks_on(other)}
    training.wait_for(lambda: not first & {p.pid for p in ranks_on(other)}, seconds=ENDS_S, what="the other's end")
    training.wait_for(lambda: not ranks_on(four[cut]), seconds=began + ALONE_S - time.monotonic(), what="its own end")
    assert training.wait(240) == 0, training.output
    assert f"host w{cut} (rank {cut}) gave no sign of life for {LOST_AFTER_S} s and counts as lost" in training.output
    assert f"restart 1 on {left}: tp1_pp2_dp1_zero1, as configured; host w{cut}: " in training.output
    assert training.resumed() == [4] or training.resumed() == [8]
    assert training.losses_as_they_count() == pytest.approx(undisturbed, abs=AT_MOST)
    assert list(restart_of(training, 1)["not_answering"]) == [f"w{cut}"]
    (lost,) = [event for event in training.events("end") if event["outcome"] != "complete"]
    assert (lost["outcome"], lost["host"], lost["rank"]) == ("host lost", f"w{cut}", cut)
    assert four.processes() == []


@pytest.mark.slow
def test_with_fewer_hosts_the_planner_chooses_and_the_first_plan_is_back_with_them(train, four, undisturbed):
    options = ["-r", "2", "--lost-after", str(LOST_AFTER_S)]
    training = train("w0 w1 w2 w3", *options, fault=SLOW, plan=["parallel=tp1_pp2", *RATES])
    training.wait_for_a_checkpoint()
    four[3].link("down")
    training.wait_for(lambda: len(training.events("restart")) == 1, seconds=180, what="the first restart")
    four[3].link("up")
    training.wait_for(lambda: steps_of(training.run)[-1] > 8, seconds=60, what="steps under the second plan")
    ranks_on(four[1])[0].kill()
    assert training.wait(240) == 0, training.output
    assert training.losses_as_they_count() == pytest.approx(undisturbed, abs=AT_MOST)
    fewer, back = restart_of(training, 1), restart_of(training, 2)
    assert fewer["failed"] == ["w3"] and fewer["chosen_by"] == "planner" and fewer["plan"]["ranks"] < 4
    assert fewer["plan_before"]["label"] == "tp1_pp2_dp2_zero1" and fewer["plan"]["step_s"] > 0
    assert training.events("resume")[0]["plan"] == fewer["plan"]["label"]
    assert back["chosen_by"] == "configuration" and back["plan"] == fewer["plan_before"]
    assert back["hosts"] == {"w0": 1, "w1": 1, "w2": 1, "w3": 1}
    assert four.processes() == []


EXITS = """
import os, sys, time
sys.path.insert(0, {root!r})
from conf.cli import main

def run(config, plan):
    if os.environ["RANK"] == "0":
        with open("attempts", "a") as file:
            file.write("x")
    codes = config.run.experiment.split("-")[1:]
    return int(codes[min(os.path.getsize("attempts"), len(codes)) - 1]) if os.environ["RANK"] == "0" else time.sleep(3)

if __name__ == "__main__":
    main(run)
"""


@pytest.mark.parametrize(
    ("codes", "attempts"),
    [
        ("75", 1),  # stopped on request
        pytest.param("3-75", 2, marks=pytest.mark.slow),
        pytest.param("3-4-5", 3, marks=pytest.mark.slow),  # the budget is used up: the last one's code
        pytest.param("2", 1, marks=pytest.mark.slow),
        pytest.param("76", 1, marks=pytest.mark.slow),
        pytest.param("143", 1, marks=pytest.mark.slow),
    ],
)
def test_final_codes_are_never_started_again_and_the_last_code_reaches_the_caller(four, tmp_path, codes, attempts):
    (tmp_path / "exits.py").write_text(EXITS.format(root=str(Path(MULTINODE).parents[1])))
    (tmp_path / "hostfile").write_text("w0 slots=1\nw1 slots=1\n")
    command = [MULTINODE, "hostfile", "-r", "2", "exits.py", "parallel=tp1_pp2", f"run.experiment=c-{codes}"]
    output = tmp_path / "output.txt"
    started = four[0].start(command, folder=tmp_path, output=output, environ=environ(four))
    assert started.wait(timeout=120) == int(codes.split("-")[-1]), output.read_text()
    assert (tmp_path / "attempts").read_text() == "x" * attempts
    assert four.processes() == []


def test_a_script_that_is_killed_leaves_no_rank_on_any_host(four, tmp_path):
    (tmp_path / "hostfile").write_text("w0 slots=1\nw1 slots=1\n")
    command = [MULTINODE, "hostfile", "--lost-after", "5", SHOWS, "parallel=tp1_pp2", "run.experiment=waits"]
    started = four[2].start(command, folder=tmp_path, output=tmp_path / "output.txt", environ=environ(four))
    wait_for(lambda: all((tmp_path / f"rank-{n}.json").exists() for n in (0, 1)), seconds=60, what="ranks")
    four[2].signal(started, signal.SIGKILL)
    started.wait()
    wait_for(lambda: four.processes() == [], seconds=30, what="the end of all")
