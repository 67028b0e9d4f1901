"""Overrides and environment reach every rank over the hosts as they were typed, and secrets nothing else."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil
import pytest

from conf.cli import compose_config
from conf.load import to_plain
from tests.cluster.hosts import Hosts
from tests.cluster.runs import MULTINODE, SHOWS, environ, shown
from tests.engine.launched import wait_for

OVERRIDES = [
    "parallel=tp1_pp2",
    "run.experiment=waits",
    'telemetry.wandb.tags=[a b,"c,d",e]',
    'telemetry.wandb.group="it\'s ${seed} $HOME `id` (#%n %h) *.py;|&><!~ {k:1,j:2} é"',
    "train.sample_prompt='a \\\\ \"b\" [c] $(id) ${telemetry.wandb.project} \\' '",
    "data.sources=[{path: stdlib, weight: 2}]",
    "alerts.mine={metric: train/loss, owner: me, mitigation: 'stop it', normal: {max: 9}}",
    "~alerts.straggler",
    "run.dir=runs/${run.experiment}",
]
SECRET = "a $HOME 'q' \"d\" (x2) `id` %n\nsecond\\line"
ENVIRON = {
    "WANDB_API_KEY": SECRET, "WANDB_MODE": "offline", "HF_HOME": "/some where/hf", "HF_TOKEN": f"hf{SECRET}",
    "NCCL_DEBUG_FILE": "/tmp/64(x2)", "HYDRA_FULL_ERROR": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": "/a b:$c",
    "CUDA_VISIBLE_DEVICES": "7", "NOT_LISTED": "stays here",
}  # fmt: skip


class Launch:
    """What the ranks were given and what could be seen meanwhile."""

    def __init__(self, hosts: Hosts, folder: Path, launcher: str):
        folder.mkdir()
        self.folder, self.launcher = folder, launcher
        (folder / ".deepspeed_env").write_text("# mine\n\nMY_OWN=a b=c $HOME\n")
        hostfile = hosts.hostfile(folder / "hosts")
        started = hosts[0].start(
            [MULTINODE, str(hostfile), "--launcher", launcher, SHOWS, *OVERRIDES],
            folder=folder, output=folder / "output.txt", environ=environ(hosts, **ENVIRON),
        )  # fmt: skip
        try:
            wait_for(lambda: all((folder / f"rank-{n}.json").exists() for n in (0, 1)), seconds=120, what="ranks")
            self.command_lines = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
            self.memory = [host.run(["bash", "-c", "ls /dev/shm; cat /dev/shm/* 2>&1; true"]) for host in hosts]
        finally:
            (folder / "go").touch()
            self.code = started.wait(timeout=60)
        self.output = (folder / "output.txt").read_text()
        self.ranks = [shown(folder, rank) for rank in (0, 1)]
        self.left = hosts.processes()
        self.memory_after = [host.run(["ls", "/dev/shm"]) for host in hosts]


@pytest.fixture(scope="module", params=["pdsh", "openmpi"])
def launch(hosts, tmp_path_factory, request) -> Launch:
    return Launch(hosts, tmp_path_factory.mktemp("words") / "a b'$c (%n)", request.param)


def test_it_ends_well_on_both_hosts_and_leaves_nothing(launch):
    assert launch.code == 0, launch.output
    assert [rank["host"] for rank in launch.ranks] == ["w0", "w1"] and launch.ranks[0]["of"] == 2
    assert launch.left == [] and launch.memory_after == ["", ""]


def test_overrides_arrive_unchanged_on_every_rank(launch):
    expected = to_plain(compose_config([*OVERRIDES, "resume=auto"]))
    assert expected["telemetry"]["wandb"]["tags"] == ["a b", "c,d", "e"]
    for rank in launch.ranks:
        assert rank["config"] == expected
        assert rank["folder"] == str(launch.folder)


def test_the_listed_environment_arrives_with_any_value(launch):
    for rank in launch.ranks:
        for name in ENVIRON.keys() - {"CUDA_VISIBLE_DEVICES", "NOT_LISTED"}:
            assert rank["environ"][name] == ENVIRON[name]
        assert rank["environ"]["MY_OWN"] == "a b=c $HOME"
        assert "NOT_LISTED" not in rank["environ"]
        assert rank["environ"]["CUDA_VISIBLE_DEVICES"] == "0"  # the slot there, not the caller's mask
    assert "CUDA_VISIBLE_DEVICES=7 is this machine's and not sent" in launch.output


def test_secrets_are_in_no_output_no_command_line_and_no_file(launch):
    part = "second\\line"
    starter = {"pdsh": "deepspeed.launcher.launch", "openmpi": "mpirun"}[launch.launcher]
    assert any(starter in line for line in launch.command_lines)
    seen = [launch.output, *launch.command_lines, *launch.memory]
    for path in Path(launch.folder).iterdir():
        if not re.fullmatch(r"rank-\d\.json", path.name):  # that is where the recipe of this test writes it down
            seen.append(path.read_text())
    assert not any(part in text for text in seen)


def test_the_first_hosts_address_on_the_route_serves_and_names_the_network(launch):
    for rank in launch.ranks:
        assert rank["environ"]["MASTER_ADDR"] == "10.77.0.1"  # its own name is 127.0.1.1 there
        assert rank["environ"]["GLOO_SOCKET_IFNAME"] == rank["environ"]["NCCL_SOCKET_IFNAME"] == "eth0"
    assert os.path.basename(MULTINODE) in " ".join(launch.command_lines)
