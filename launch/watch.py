"""A started run: watched through DeepSpeed's launcher and a guard on every host, asked to stop, and ended everywhere.

pdsh waits for all hosts. Where the ranks of one have failed, the others may wait in a collective for long, so that they
are ended `grace_s` after the first; until then they report what they know themselves. A host that gives no sign of
life for `lost_after_s` is lost: no peer knows more of it, and all are ended at once.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import psutil

from conf.load import ConfigError
from launch import environment
from launch.guards import Guards
from launch.remote import Ssh

LOST_AFTER_S = 60.0
GRACE_S = 30.0  # at most, from the first host that failed to the end of all: peers say in which step they lost it
FAILED = re.compile(r"pdsh@[^:]+: (\S+): ssh exited with exit code (\d+)")
END_S = 30.0  # for the ranks of a host to end: 10 s until they are killed, twice
LOST = 255  # ssh's code where the connection ended
STOP_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 143}
# Of a rank that did not train yet and knew no SIGUSR1: as DeepSpeed's launcher says it, and as a shell does.
UNHANDLED = (256 - signal.SIGUSR1, 128 + signal.SIGUSR1)


@dataclass(frozen=True)
class Job:
    """What is run. hosts, slots (ranks of each): by node rank; failed: what the launcher says of one, (host, code)."""

    launch: str
    hosts: tuple[str, ...]
    slots: tuple[int, ...]
    command: tuple[str, ...]
    environ: Mapping[str, str]
    ssh: Ssh
    lost_after_s: float = LOST_AFTER_S
    failed: re.Pattern[str] = FAILED
    shared: bool = False  # a host's ranks read its file themselves, and the last one removes it

    @property
    def grace_s(self) -> float:
        return min(GRACE_S, self.lost_after_s)

    @property
    def alone_s(self) -> float:
        """From its last sign of life to the end of all ranks on a host that is cut off: its own guard ends them."""
        return self.lost_after_s + self.grace_s + 10.0

    def orders(self, **more: object) -> dict[str, dict[str, object]]:
        """Who is meant, for every host."""
        return {
            host: {
                "id": self.launch, "node": number, "path": environment.path_of(self.launch, str(number)),
                "marker": environment.marker_of(self.launch), **more,
            }
            for number, host in enumerate(self.hosts)
        }  # fmt: skip

    def host_of(self, label: str) -> str:
        """The host that pdsh means: it writes no user and no domain."""
        names = {host: host.rpartition("@")[2] for host in self.hosts}
        return next((host for host, name in names.items() if label in (name, name.partition(".")[0])), label)

    def named(self, host: str) -> str:
        """A host with its ranks, for the reader."""
        if host not in self.hosts:  # pdsh's name for it, where nothing in the hostfile is like it
            return f"host {host}"
        number = self.hosts.index(host)
        last = list(accumulate(self.slots))[number] - 1
        first = last - self.slots[number] + 1
        return f"host {host} (rank {first})" if first == last else f"host {host} (ranks {first} to {last})"


@dataclass
class Ended:
    """How it ended. failed: host -> its exit code, in the order of their ends; lost: hosts without a sign of life;
    unreached: hosts on which ranks may be left; why: of the first, in words.
    """

    code: int = 0
    requests: list[signal.Signals] = field(default_factory=list)  # to stop
    failed: dict[str, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)
    why: str = ""
    first_failure: float = float("inf")
    is_cut: bool = False  # ended from here: what fails from then on does so for that

    @property
    def culprits(self) -> list[str]:
        """Hosts that ended the run, as far as codes tell: the peers of a lost rank leave with 1, as after any error."""
        gone = dict.fromkeys([*self.lost, *(host for host, code in self.failed.items() if code == LOST)])
        return list(gone) or [host for host, code in self.failed.items() if code != 1]

    @property
    def is_host_lost(self) -> bool:
        return bool(self.lost) or LOST in self.failed.values()

    def fail(self, host: str, code: int) -> None:
        if host not in self.failed and not self.is_cut:
            self.failed[host] = code
            self.first_failure = min(self.first_failure, time.monotonic())


def run(job: Job, variables: Sequence[Mapping[str, str]]) -> Ended:
    """No process of the launch is left on a host that answers. variables: by node rank."""
    seen = Ended()
    before = {
        number: signal.signal(number, lambda n, frame: seen.requests.append(signal.Signals(n))) for number in STOP_CODES
    }
    launcher = None
    try:
        with Guards(job.ssh, job.orders(grace_s=job.grace_s), lost_after_s=job.lost_after_s) as guards:
            try:
                _deliver(job, variables)
                # In / , as the runner writes its folder into the hosts' shells unquoted.
                launcher = subprocess.Popen(
                    job.command, env=job.environ, cwd="/", stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
                    text=True, errors="surrogateescape", start_new_session=True,
                )  # fmt: skip
                reader = threading.Thread(target=_pass_on, args=(job, launcher, seen), daemon=True)
                reader.start()
                seen.code = _wait(job, launcher, seen, guards)
            finally:
                seen.is_cut = launcher is not None and launcher.poll() is None
                finished = _end(job, seen, early=seen.is_cut)
    finally:
        if launcher is not None:
            _end_here(launcher)
            reader.join(timeout=5.0)
        for number, handler in before.items():
            signal.signal(number, handler)
    if seen.code == 0 and seen.failed:  # mpirun does not tell it
        seen.code = next(iter(seen.failed.values()))
    if launcher.returncode < 0 and not seen.is_cut:
        seen.why = f"{Path(job.command[0]).name} was ended by {signal.Signals(-launcher.returncode).name} here"
    elif seen.code == 0 and not finished:
        seen.why = "the launcher ended but rank 0 did not finish: some process was killed"
    if seen.why:
        say(seen.why)
        seen.code = 1
    if seen.requests and seen.code in UNHANDLED:
        seen.code = STOP_CODES[seen.requests[0]]
    seen.why = seen.why or _reason(job, seen)
    return seen


def _deliver(job: Job, variables: Sequence[Mapping[str, str]]) -> None:
    files = job.orders()
    for number, order in enumerate(files.values()):
        order["text"] = environment.shell_file(str(order["path"]), variables[number], removes=not job.shared)
    problems = [f"host {one.host}: {one.problem}" for one in job.ssh.call("receive", files) if one.problem is not None]
    if problems:
        raise ConfigError(problems)


def _pass_on(job: Job, launcher: subprocess.Popen[str], seen: Ended) -> None:
    """The launcher's errors to ours, noting the hosts that fail."""
    assert launcher.stderr is not None
    for line in launcher.stderr:
        match = job.failed.match(line)
        if match is not None:
            seen.fail(job.host_of(match[1]), int(match[2]))
        sys.stderr.write(line)
        sys.stderr.flush()


def _wait(job: Job, launcher: subprocess.Popen[str], seen: Ended, guards: Guards) -> int:
    """Until it ends, or a second request, a failed host or a lost one ends it."""
    handled = 0
    while launcher.poll() is None:
        time.sleep(0.2)
        if len(seen.requests) > handled:
            handled += 1
            stop_code = STOP_CODES[seen.requests[0]]
            if handled > 1:
                return stop_code
            answers = job.ssh.call("ask", job.orders())
            if not any(answer.values.get("asked") for answer in answers):
                return stop_code  # nothing runs yet
        for host in guards.closed:
            seen.fail(host, LOST)
        if time.monotonic() - seen.first_failure > job.grace_s:
            host, code = next(iter(seen.failed.items()))
            say(f"{_reason(job, seen)}; the others did not end within {job.grace_s:g} s and are ended")
            return 1 if code == LOST else code
        if guards.silent:
            seen.lost = guards.silent
            say(f"{_reason(job, seen)}; all are ended")
            return 1
    return launcher.returncode if launcher.returncode >= 0 else 1


def _reason(job: Job, seen: Ended) -> str:
    """Of what ended it, the host first that its peers' ends follow from."""
    host = next(iter(seen.culprits or seen.failed), None)
    if host is None:
        return f"exit code {seen.code}"
    if host in seen.lost:
        return f"{job.named(host)} gave no sign of life for {job.lost_after_s:g} s and counts as lost"
    code = seen.failed[host]
    if code == LOST:
        return f"{job.named(host)} is lost: its connection ended"
    return f"{job.named(host)} {ended_with(code)}"


def ended_with(code: int) -> str:
    """The exit code of a host's DeepSpeed launcher in words."""
    killed = f": {signal.Signals(256 - code).name} ended a rank there" if 256 - code in set(signal.Signals) else ""
    return f"ended with code {code}{killed}"


def _end(job: Job, seen: Ended, *, early: bool) -> bool:
    """End what is left on every host; whether rank 0 came to its end. early: while the launcher still runs."""
    answers = job.ssh.call("end", job.orders(asked=bool(seen.requests), early=early), timeout_s=END_S)
    for answer in answers:
        if answer.problem is not None:
            seen.unreached.append(answer.host)
            say(f"host {answer.host}: {answer.problem}; if it lives, it ends its ranks within {job.alone_s:g} s")
    return bool(answers[0].values.get("finished"))


def end_left(job: Job, hosts: Sequence[str]) -> list[str]:
    """Try again where an end was not heard of; the hosts that still do not answer."""
    orders = {host: order for host, order in job.orders(asked=False, early=False).items() if host in hosts}
    return [one.host for one in job.ssh.call("end", orders, timeout_s=END_S) if one.problem is not None]


def _end_here(launcher: subprocess.Popen[str]) -> None:
    """The runner, pdsh and its ssh, which pdsh puts into a group of their own."""
    if launcher.poll() is None:
        runner = psutil.Process(launcher.pid)
        for process in [runner, *runner.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    launcher.wait()


def say(text: str) -> None:
    print(f"launch/multinode.sh: {text}", file=sys.stderr, flush=True)
