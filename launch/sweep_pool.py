"""Jobs of a sweep as processes, one after the other or several at once, each with its output in a file of its own.

The first job in line that fits into what is free starts: free jobs, free ranks, free GPUs. A job that fails stops no
other. SIGINT, SIGTERM, SIGUSR1 or SIGHUP once: it goes on to the jobs that run, which save, and no other starts; a
second time it goes on too, and the launchers end their ranks at once. Not here: which jobs there are (sweep.py).
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch.sweep_jobs import SweepJob

STOP = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGUSR1: signal.SIGUSR1}
STOP[signal.SIGHUP] = signal.SIGTERM  # the launchers know the other three
# Each would make one run, or one port, of all jobs.
ONE_RUNS_OWN = ("WANDB_RUN_ID", "WANDB_NAME", "WANDB_RESUME", "MASTER_PORT")
POLL_S = 0.1


@dataclass(frozen=True)
class Task:
    """A job with what it takes. folder: the run's; ranks: None where the launcher's hosts say."""

    job: SweepJob
    command: tuple[str, ...]
    folder: Path
    ranks: int | None

    @property
    def log(self) -> Path:
        """All that the job prints: beside its folder, which the run itself makes."""
        return self.folder.with_name(f"{self.folder.name}.log")


@dataclass(frozen=True)
class Ended:
    """A job that ran."""

    task: Task
    code: int
    seconds: float


@dataclass(frozen=True)
class Limits:
    """What the jobs that run share; None: no limit, or not to be shared out. devices: GPUs; cores: on a CPU."""

    jobs: int | None = None
    ranks: int | None = None
    devices: Sequence[str] | None = None
    cores: int | None = None


@dataclass
class _Running:
    task: Task
    process: subprocess.Popen[bytes]
    devices: Sequence[str]
    started: float


@dataclass
class Pool:
    """requests: the signals that came; the first one ends the sweep after the jobs that run."""

    limits: Limits
    say: Callable[[str], None]
    requests: list[signal.Signals] = field(default_factory=list)

    def listen(self) -> None:
        for number in STOP:
            signal.signal(number, lambda n, frame: self.requests.append(signal.Signals(n)))

    def run(self, tasks: Sequence[Task], ended: Callable[[Ended], None]) -> None:
        """All tasks, or those that were started before a request to stop. `ended` is called for each as it ends."""
        waiting, running = list(tasks), list[_Running]()
        passed_on = 0
        try:
            while running or (waiting and not self.requests):
                for task in list(waiting):
                    if not self.requests and self._fits(task, running):
                        waiting.remove(task)
                        running.append(self._start(task, running))
                time.sleep(POLL_S)
                for number in self.requests[passed_on:]:
                    passed_on += 1
                    for one in running:
                        one.process.send_signal(STOP[number])
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    code = one.process.returncode
                    ended(Ended(one.task, code if code >= 0 else 128 - code, time.monotonic() - one.started))
        finally:  # nothing runs on where this process fails, as at a closed pipe
            for one in running:
                one.process.terminate()
            for one in running:
                one.process.wait()

    def _fits(self, task: Task, running: Sequence[_Running]) -> bool:
        taken = sum(one.task.ranks or 0 for one in running)
        ranks = self.limits.ranks is None or taken + (task.ranks or 0) <= self.limits.ranks
        free = len(self._free(running)) if self.limits.devices is not None else None
        jobs = self.limits.jobs is None or len(running) < self.limits.jobs
        return jobs and ranks and (free is None or (task.ranks or 0) <= free)

    def _free(self, running: Sequence[_Running]) -> list[str]:
        taken = {device for one in running for device in one.devices}
        return [device for device in self.limits.devices or () if device not in taken]

    def _start(self, task: Task, running: Sequence[_Running]) -> _Running:
        devices = self._free(running)[: task.ranks or 0]
        environ = self._environ(task, devices)
        task.log.parent.mkdir(parents=True, exist_ok=True)
        self.say(f"{shlex.join(task.command)} >> {task.log}")
        with task.log.open("ab") as log:
            # A session of its own: Ctrl-C reaches it through this process alone, once for each time.
            process = subprocess.Popen(
                task.command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        return _Running(task, process, devices, time.monotonic())

    def _environ(self, task: Task, devices: Sequence[str]) -> Mapping[str, str]:
        environ = {name: value for name, value in os.environ.items() if name not in ONE_RUNS_OWN}
        if devices:
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        if self.limits.cores is not None:
            ranks = self.limits.ranks or (self.limits.jobs or 1) * (task.ranks or 1)
            environ.setdefault("OMP_NUM_THREADS", str(max(1, self.limits.cores // ranks)))
        return environ
