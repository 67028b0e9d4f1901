"""Real Slurm on the hosts of the cluster tests: munged and slurmd on each, slurmctld on the first.

    slurm = Slurm(hosts, folder)
    job = slurm.submit(["-N", "2", SBATCH, PRETRAIN, ...], folder)
    slurm.wait(job)

All of its files are in the folder, all of its processes are on the hosts and end with them. It kills by process tree,
as no control group is asked for; it requeues within seconds (cred_expire), which takes minutes elsewhere.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.cluster.hosts import Host, Hosts
from tests.cluster.runs import ROOT, environ
from tests.engine.launched import wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
DAEMONS = ("munged", "slurmctld", "slurmscriptd", "slurmd")
SBATCH = str(ROOT / "launch" / "slurm.sbatch")
SUBMIT = str(ROOT / "launch" / "submit.py")
CPUS, GPUS = 16, 4  # of each host, whatever the machine has: the GPUs are null devices
CONF = """
ClusterName=test
SlurmctldHost={first.name}({first.addresses[0]})
AuthType=auth/munge
AuthInfo=socket=/run/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
KillWait=5
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=NO PriorityTier=1 GraceTime=90
PartitionName=urgent Nodes=ALL MaxTime=INFINITE OverSubscribe=NO PriorityTier=2
"""


def why_not() -> str | None:
    """What of Slurm this machine lacks, in words."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return (
        f"{', '.join(missing)} not installed; `make cluster-test` installs what it needs on Debian" if missing else None
    )


class Slurm:
    """On all of the hosts, ready for jobs."""

    def __init__(self, hosts: Hosts, folder: Path):
        self.hosts, self.folder = hosts, folder
        folder.mkdir()
        about = f"CPUs={CPUS} Gres=gpu:{GPUS}"
        nodes = [f"NodeName={host.name} NodeAddr={host.addresses[0]} {about}\n" for host in hosts]
        for number in range(GPUS):
            os.mknod(folder / f"gpu{number}", 0o600 | stat.S_IFCHR, os.stat(os.devnull).st_rdev)
        (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
        (folder / "slurm.conf").write_text(CONF.format(first=hosts[0], folder=folder) + "".join(nodes))
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        for host in hosts:
            files = [f"{folder}/munged-{host.name}"] * 2
            host.run([
                "munged", "--force", "--key-file", str(key), "--socket", "/run/munge.socket", "--pid-file",
                "/run/munged.pid", "--log-file", f"{files[0]}.log", "--seed-file", f"{files[1]}.seed",
            ])  # fmt: skip
        self.run("slurmctld")
        for host in hosts:
            self.run("slurmd", on=host)
        ready = ["sinfo", "--noheader", "--states=idle", "--partition=main", "--format=%D"]
        wait_for(lambda: self.run(*ready).strip() == str(len(hosts)), seconds=60, what="Slurm's hosts")

    def run(self, *command: str, on: Host | None = None) -> str:
        """A command of Slurm's on a host (the first)."""
        path = f"PATH={os.environ['PATH']}:/usr/sbin:/sbin"
        return (on or self.hosts[0]).run(["env", f"SLURM_CONF={self.folder}/slurm.conf", path, *command])

    def call(self, command: Sequence[str], folder: Path, **more: str) -> tuple[int, str]:
        """(exit code, output) of a user's command on the first host."""
        given = environ(self.hosts, SLURM_CONF=str(self.folder / "slurm.conf"), **more)
        done = subprocess.run(
            self.hosts[0].inside(["env", "-C", str(folder), *command]), env=given, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60,
        )  # fmt: skip
        return done.returncode, done.stdout

    def submit(self, words: Sequence[str], folder: Path, **more: str) -> str:
        """The number of the job of `sbatch WORDS`."""
        code, output = self.call(["sbatch", "--parsable", *words], folder, **more)
        assert code == 0, output
        return output.strip()

    def about(self, job: str) -> dict[str, str]:
        """What scontrol says of a job."""
        return dict(word.split("=", 1) for word in self.run("scontrol", "show", "job", job).split() if "=" in word)

    def state(self, job: str) -> str:
        return self.about(job)["JobState"]

    def wait(self, job: str, *, seconds: float = 120) -> tuple[str, int]:
        """(state, exit code) of a job's end."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        try:
            wait_for(lambda: self.state(job) in over, seconds=seconds, what=f"the end of job {job}")
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.about(job)}") from error
        found = self.about(job)
        return found["JobState"], int(found["ExitCode"].partition(":")[0])

    def processes(self) -> list[psutil.Process]:
        """On all hosts, but for Slurm's own."""
        return [process for process in self.hosts.processes() if not is_slurms(process)]

    def rank_on(self, host: Host, number: int) -> psutil.Process:
        """The process of a rank, by its number."""
        found = [process for process in host.processes() if not is_slurms(process) and rank_of(process) == str(number)]
        return min(found, key=lambda process: process.pid)  # its own children have its environment

    def end(self) -> None:
        """Every job."""
        self.run("scancel", "--user=root")
        wait_for(lambda: self.run("squeue", "--noheader") == "", seconds=60, what="the end of all jobs")
        for process in self.processes():
            process.send_signal(signal.SIGKILL)


def is_slurms(process: psutil.Process) -> bool:
    try:
        return process.name() in DAEMONS
    except psutil.NoSuchProcess:
        return True


def rank_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("RANK")
    except psutil.Error:
        return None
