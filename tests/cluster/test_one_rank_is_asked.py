"""Case F7: SIGTERM to one rank alone, on the second host: all save the same step, say 75, and the run goes on from it.

Through a launcher a host or one for all; Slurm's: test_slurm_requeue.py.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from engine.checkpoint_folder import list_checkpoints
from tests.cluster.hosts import Hosts
from tests.cluster.runs import BIN, MULTINODE, ROOT, TINY, environ
from tests.engine.launched import FAULTY, events_of, steps_of, wait_for

Start = Callable[[Hosts, Path, Sequence[str]], list["subprocess.Popen[str]"]]
SLOWLY = "FAULT=slow\n"


def multinode(*options: str) -> Start:
    def start(hosts: Hosts, folder: Path, words: Sequence[str]) -> list[subprocess.Popen[str]]:
        command = [MULTINODE, str(hosts.hostfile(folder / "hosts")), *options, str(FAULTY), *words]
        return [hosts[0].start(command, folder=folder, output=folder / "output-0.txt", environ=environ(hosts))]

    return start


def on_each(hosts: Hosts, folder: Path, command: Sequence[str], **more: str) -> list[subprocess.Popen[str]]:
    return [
        hosts[n].start(command, folder=folder, output=folder / f"output-{n}.txt", environ=environ(hosts, **more))
        for n in (0, 1)
    ]


def node(hosts: Hosts, folder: Path, words: Sequence[str]) -> list[subprocess.Popen[str]]:
    script = str(ROOT / "launch" / "node.sh")
    return on_each(hosts, folder, [script, str(hosts.hostfile(folder / "hosts")), str(FAULTY), *words])


def elastic(hosts: Hosts, folder: Path, words: Sequence[str]) -> list[subprocess.Popen[str]]:
    command = [str(BIN / "python"), str(ROOT / "launch" / "elastic.py"), "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-id", "asked", "--rdzv-endpoint", "w0:31410", str(FAULTY), *words]
    return on_each(hosts, folder, [*command, "resume=auto"], GLOO_SOCKET_IFNAME="eth0", FAULT="slow")


def rank_1(hosts: Hosts) -> psutil.Process:
    ranks = [process for process in hosts[1].processes() if process.environ().get("RANK") == "1"]
    (found,) = [one for one in ranks if str(FAULTY) in one.cmdline() and "elastic.py" not in " ".join(one.cmdline())]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [multinode(), multinode("--launcher", "openmpi"), node, elastic],
    ids=["multinode.sh", "openmpi", "node.sh", "elastic.py"],
)
def test_all_save_the_same_step_and_the_run_goes_on_from_it(hosts: Hosts, tmp_path: Path, start: Start) -> None:
    (tmp_path / ".deepspeed_env").write_text(SLOWLY)
    run, words = tmp_path / "runs" / "default" / "r", [*TINY, "parallel=tp1_pp2", "checkpoint.interval=0"]
    launchers = start(hosts, tmp_path, [*words, "train.train_iters=100000"])
    try:
        wait_for(lambda: len(steps_of(run)) >= 2, seconds=180, what="two steps")
        rank_1(hosts).send_signal(signal.SIGTERM)
        codes = [one.wait(timeout=90) for one in launchers]
        output = "".join(path.read_text() for path in sorted(tmp_path.glob("output-*.txt")))
        assert set(codes) == {75} and "Traceback" not in output, output
        last = steps_of(run)[-1]
        assert [step for step, _ in list_checkpoints(run / "checkpoints")] == [last], output
        assert hosts.processes() == []
        launchers = start(hosts, tmp_path, [*words, f"train.train_iters={last + 2}"])
        assert {one.wait(timeout=180) for one in launchers} == {0}
        assert steps_of(run) == list(range(1, last + 3))
        assert [event["step"] for event in events_of(run) if event["event"] == "resume"] == [last]
    finally:
        for process in hosts.processes():
            process.kill()
        for one in launchers:
            one.wait()
