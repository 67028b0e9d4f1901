"""A started run: watched through DeepSpeed's launcher, asked to stop, and ended on every host.

pdsh waits for all hosts. Where one has failed the others may wait in a collective for long, so that they are ended
`GRACE_S` after the first; until then they report what they know themselves.
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

import psutil

from conf.load import ConfigError
from launch import environment
from launch.remote import Ssh

GRACE_S = 30.0  # from the first host that failed to the end of all: its peers say in which step they lost it
FAILED = re.compile(r"pdsh@[^:]+: (\S+): ssh exited with exit code (\d+)")
STOP_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 143}
# Of a rank that did not train yet and knew no SIGUSR1: as DeepSpeed's launcher says it, and as a shell does.
UNHANDLED = (256 - signal.SIGUSR1, 128 + signal.SIGUSR1)


@dataclass(frozen=True)
class Job:
    """What is run. hosts: by node rank; failed: what the launcher says of one, (host, code)."""

    launch: str
    hosts: tuple[str, ...]
    command: tuple[str, ...]
    environ: Mapping[str, str]
    ssh: Ssh
    failed: re.Pattern[str] = FAILED
    shared: bool = False  # a host's ranks read its file themselves, and the last one removes it

    def orders(self, **more: object) -> dict[str, dict[str, object]]:
        """Who is meant, for every host."""
        return {
            host: {
                "id": self.launch, "node": number, "path": environment.path_of(self.launch, str(number)),
                "marker": environment.marker_of(self.launch), **more,
            }
            for number, host in enumerate(self.hosts)
        }  # fmt: skip


@dataclass
class Seen:
    """What came from outside while it ran."""

    requests: list[signal.Signals] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)  # host -> its exit code, in the order of their ends
    first_failure: float = float("inf")


def run(job: Job, variables: Sequence[Mapping[str, str]]) -> int:
    """The exit code; no process of the launch is left on a host that answers. variables: by node rank."""
    seen = Seen()
    for number in STOP_CODES:
        signal.signal(number, lambda n, frame: seen.requests.append(signal.Signals(n)))
    launcher = None
    try:
        _deliver(job, variables)
        # In / , as the runner writes its folder into the hosts' shells unquoted.
        launcher = subprocess.Popen(
            job.command, env=job.environ, cwd="/", stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            errors="surrogateescape", start_new_session=True,
        )  # fmt: skip
        reader = threading.Thread(target=_pass_on, args=(job, launcher, seen), daemon=True)
        reader.start()
        code = _wait(job, launcher, seen)
    finally:
        finished = _end(job, asked=bool(seen.requests), early=launcher is not None and launcher.poll() is None)
        if launcher is not None:
            _end_here(launcher)
            reader.join(timeout=5.0)
    if code == 0 and seen.failed:  # mpirun does not tell it
        code = next(iter(seen.failed.values()))
    if code == 0 and not finished:
        say("the launcher ended but rank 0 did not finish: some process was killed")
        code = 1
    if seen.requests and code in UNHANDLED:
        code = STOP_CODES[seen.requests[0]]
    return code


def _deliver(job: Job, variables: Sequence[Mapping[str, str]]) -> None:
    files = job.orders()
    for number, order in enumerate(files.values()):
        order["text"] = environment.shell_file(str(order["path"]), variables[number], removes=not job.shared)
    problems = [f"host {one.host}: {one.problem}" for one in job.ssh.call("receive", files) if one.problem is not None]
    if problems:
        raise ConfigError(problems)


def _pass_on(job: Job, launcher: subprocess.Popen[str], seen: Seen) -> None:
    """The launcher's errors to ours, noting the hosts that fail."""
    assert launcher.stderr is not None
    for line in launcher.stderr:
        match = job.failed.match(line)
        if match is not None:
            seen.failed.setdefault(match[1], int(match[2]))
            seen.first_failure = min(seen.first_failure, time.monotonic())
        sys.stderr.write(line)
        sys.stderr.flush()


def _wait(job: Job, launcher: subprocess.Popen[str], seen: Seen) -> int:
    """Until it ends, or a second request or a failed host ends it."""
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
        if time.monotonic() - seen.first_failure > GRACE_S:
            host, code = next(iter(seen.failed.items()))
            reason = "is lost" if code == 255 else f"ended with code {code}"
            say(f"host {host} {reason}; the others did not end within {GRACE_S:g} s and are ended")
            return 1 if code == 255 else code
    return launcher.returncode if launcher.returncode >= 0 else 1


def _end(job: Job, *, asked: bool, early: bool) -> bool:
    """End what is left on every host; whether rank 0 came to its end. early: while the launcher still runs."""
    answers = job.ssh.call("end", job.orders(asked=asked, early=early))
    for answer in answers:
        if answer.problem is not None:
            say(f"host {answer.host}: {answer.problem}; its ranks end by themselves after cluster.hang_timeout_s")
    return bool(answers[0].values.get("finished"))


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
