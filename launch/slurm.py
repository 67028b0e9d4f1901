"""What launch/slurm.sbatch does on the first host of its job: start the ranks through srun, watch them, and when Slurm
wants its hosts back let them save and have the job requeued.

Not here: how tasks become ranks (slurm_layout.py), what a task does (slurm_rank.py, node.py).
"""

from __future__ import annotations

import getopt
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conf.load import ConfigError
from conf.schema import Config
from launch import on_host
from launch.ask import check_address
from launch.remote import ROOT
from launch.request import Request, check_given, composed
from launch.request import parse as parse_request
from launch.slurm_layout import Layout, layout
from launch.slurm_names import names, number, required
from launch.watch import GRACE_S, STOP_CODES

USAGE = "usage: sbatch ... launch/slurm.sbatch [--interface NAME] [--jobs FILE] RECIPE [OVERRIDES...]"
FAILED = re.compile(r"srun: error: (\S+): tasks? (\S+): (?:Exited with exit code (\d+)|(\w.*))")
# Of ranks that a signal ended before they could save anything, as srun and the launchers say it.
NOTHING_SAVED = (128 + signal.SIGUSR1, 143)


@dataclass
class Seen:
    """What came from outside while it ran. failed: (host, task, how), of the first."""

    requests: list[signal.Signals] = field(default_factory=list)
    failed: tuple[str, str, str] | None = None
    failed_at: float = float("inf")


@dataclass(frozen=True)
class Job:
    """label: its number, with that of its array task. folder: of the ranks' output."""

    label: str
    folder: Path
    request: Request
    config: Config


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Job:
    """The command line, for this start of the job. --jobs: launch/submit.py's file, of which an array task runs one."""
    try:
        options, words = getopt.getopt(list(argv), "", ["interface=", "jobs="])
    except getopt.GetoptError as error:
        raise ConfigError([f"{error}; {USAGE}"]) from None
    if not words:
        raise ConfigError([USAGE])
    given, task = dict(options), environ.get("SLURM_ARRAY_TASK_ID")
    label = str(number(environ, "SLURM_JOB_ID"))
    if task is not None:
        label = f"{number(environ, 'SLURM_ARRAY_JOB_ID')}_{number(environ, 'SLURM_ARRAY_TASK_ID')}"
    folder = Path.cwd() / f"slurm-{label}"
    interface = ["--interface", given["--interface"]] if "--interface" in given else []
    if "--jobs" in given:
        words += _of_sweep(Path(given["--jobs"]), task)
    elif not any(word.lstrip("+").startswith("run.id=") for word in words):
        words.append(f"run.id=slurm-{label.replace('_', '-')}")  # 17_0 would be the number 170
    request = parse_request([str(folder / "hosts"), *interface, *words], usage=USAGE)
    config = composed(request.recipe, request.overrides)
    return Job(label, folder, _goes_on(request, config, environ), config)


def _of_sweep(path: Path, task: str | None) -> list[str]:
    try:
        jobs = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError([f"--jobs {path}: {error}; launch/submit.py -m writes it where all hosts see it"]) from None
    if task is None or int(task) >= len(jobs):
        raise ConfigError([f"--jobs {path} has {len(jobs)} jobs; submit it with --array=0-{len(jobs) - 1}"])
    return list(jobs[int(task)])


def _goes_on(request: Request, config: Config, environ: Mapping[str, str]) -> Request:
    """A job that was requeued goes on with its own run, whatever it began with."""
    run = config.run
    began = run.id is not None and (Path(run.dir).expanduser() / run.experiment / run.id).is_dir()
    if environ.get("SLURM_RESTART_COUNT", "0") == "0" or not began:
        return request
    kept = [word for word in request.overrides if not word.startswith("resume=")]
    return replace(request, overrides=(*kept, "resume=auto"))


def command_of(job: Job, tasks: Layout) -> list[str]:
    """Slurm's own ways to end a step are off: they would leave nobody time to say what happened (see _wait)."""
    command = ["srun", f"--nodes={len(tasks.hosts)}", f"--ntasks={tasks.tasks}", "--distribution=block", "--mpi=none"]
    command += ["--kill-on-bad-exit=0", "--wait=0", "--open-mode=append"]
    output = f"--output={str(job.folder).replace('%', '%%')}"
    interface = ["--interface", job.request.interface] if job.request.interface is not None else []
    words = [*interface, str(job.request.recipe), *job.request.overrides]
    if tasks.task_per_rank:
        command += [f"{output}/rank-%t.log", sys.executable, str(ROOT / "launch" / "slurm_rank.py")]
    else:
        hosts = [str(ROOT / "launch" / "node.sh"), str(job.request.hostfile)]
        command += [f"{output}/%N.log", "--cpu-bind=none", *hosts]
    return [*command, *words]


def surroundings(job: Job, tasks: Layout, environ: Mapping[str, str]) -> dict[str, str]:
    """For srun and all ranks: where rank 0 is met. Raises ConfigError."""
    peers = list(tasks.hosts[1:])
    order = {"folder": os.getcwd(), "interface": job.request.interface, "peers": peers, "port": None}
    seen = on_host.look(order)
    if "problem" in seen:
        raise ConfigError([f"host {tasks.hosts[0]}: {seen['problem']}"])
    if "MASTER_ADDR" in environ:
        check_address(environ["MASTER_ADDR"], seen["addresses"], tasks.hosts[0])
    found = {
        "MASTER_ADDR": seen["address"],
        "MASTER_PORT": str(free_port(number(environ, "SLURM_JOB_ID"))),
        "LAUNCH_MARKER": str(job.folder / "finished"),
    }
    if "SLURM_CPUS_PER_TASK" in environ:
        found["SRUN_CPUS_PER_TASK"] = environ["SLURM_CPUS_PER_TASK"]  # srun does not ask the job since Slurm 22.05
    return {**found, **environ}


def free_port(job: int) -> int:
    """The first free one from where a job's number points, below those that the kernel gives out."""
    for port in (10000 + (16 * job + tried) % 20000 for tried in range(2000)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an ended run's port is free
            try:
                probe.bind(("", port))
                return port
            except OSError:
                continue
    raise ConfigError(["no port from 10000 to 29999 is free on this host; give MASTER_PORT"])


def run_job(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    seen = Seen()
    for stop in STOP_CODES:
        signal.signal(stop, lambda n, frame: seen.requests.append(signal.Signals(n)))
    check_given()
    job = parse(argv, environ)
    tasks = layout(environ, names(required(environ, "SLURM_JOB_NODELIST")), job.config)
    command = command_of(job, tasks)
    how = "a task a rank" if tasks.task_per_rank else "a task a host"
    print(f"{sum(tasks.ranks)} ranks on {', '.join(tasks.hosts)}, {how}; their output: {job.folder}")
    print(shlex.join(command), flush=True)
    if environ.get("DRY_RUN", "0") == "1":
        return 0
    surrounding = surroundings(job, tasks, environ)
    job.folder.mkdir(exist_ok=True)
    job.request.hostfile.write_text("".join(f"{host} slots={len(slots)}\n" for host, slots in tasks.slots.items()))
    marker = job.folder / "finished"
    marker.unlink(missing_ok=True)
    code = STOP_CODES[seen.requests[0]] if seen.requests else watch(command, surrounding, seen)
    if code == 0 and tasks.task_per_rank and not marker.exists():
        say("srun ended but rank 0 did not finish: some process was killed")
        code = 1
    if code != 0:
        tell_why(job.folder, code)
    if is_to_go_on(code, seen.requests):
        requeue(job.label)  # by its task: the number of one of an array's tasks is that of the whole array
    return code


def watch(command: Sequence[str], environ: Mapping[str, str], seen: Seen) -> int:
    srun = subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="surrogateescape"
    )
    reader = threading.Thread(target=_pass_on, args=(srun, seen), daemon=True)
    reader.start()
    code = _wait(srun, seen)
    reader.join(timeout=5.0)
    return code


def _pass_on(srun: subprocess.Popen[str], seen: Seen) -> None:
    """srun's messages to ours, noting the first task that failed."""
    assert srun.stderr is not None
    for line in srun.stderr:
        match = FAILED.match(line)
        if match is not None and seen.failed is None:
            seen.failed = (match[1], match[2], match[3] or match[4])
            seen.failed_at = time.monotonic()
        sys.stderr.write(line)
        sys.stderr.flush()


def _wait(srun: subprocess.Popen[str], seen: Seen) -> int:
    """Until it ends. A request is passed on as SIGUSR1, which srun gives to every task; SIGTERM makes it end them."""
    handled, ended = 0, None
    while srun.poll() is None:
        time.sleep(0.2)
        for request in seen.requests[handled:]:
            handled += 1
            if handled == 1:
                srun.send_signal(signal.SIGUSR1)
            elif request is not signal.SIGUSR1:  # Slurm may warn twice
                ended = STOP_CODES[request]
        if seen.failed is not None and ended is None and time.monotonic() - seen.failed_at > GRACE_S:
            host, task, how = seen.failed
            say(f"{host}: task {task}: {how}; the others did not end within {GRACE_S:g} s and are ended")
            ended = int(how) if how.isdigit() else 1
        if ended is not None:
            srun.send_signal(signal.SIGTERM)
            srun.wait()
            return ended
    if srun.returncode < 0:
        return STOP_CODES[seen.requests[0]] if seen.requests else 1
    return srun.returncode


def is_to_go_on(code: int, requests: Sequence[signal.Signals]) -> bool:
    """Whether the job stopped because its hosts are wanted, by Slurm or by who signals as Slurm does."""
    if any(request is not signal.SIGUSR1 for request in requests):
        return False
    return code == 75 or (bool(requests) and code in NOTHING_SAVED)


def requeue(number: str) -> None:
    print(f"job {number} is put back into the queue; its next start goes on with the run", flush=True)
    done = subprocess.run(["scontrol", "requeue", number], capture_output=True, text=True)
    if done.returncode != 0:
        say(f"it could not be: {done.stderr.strip()}; submit the same command with the same run.id")


def tell_why(folder: Path, code: int) -> None:
    """The lines in the ranks' output that name what went wrong."""
    wanted = re.compile(r"error: |launch/|.* failed: |a rank was lost: |no progress for ")
    lines = [
        f"{path.name}: {line.rstrip()}"
        for path in sorted(folder.glob("*.log"))
        for line in path.read_text(errors="replace").splitlines()
        if wanted.match(line)
    ]
    for line in lines[-10:]:
        print(line, file=sys.stderr)
    say(f"exit code {code}; the ranks' output is in {folder}")


def say(text: str) -> None:
    print(f"launch/slurm.sbatch: {text}", file=sys.stderr, flush=True)


def main() -> int:
    try:
        return run_job(sys.argv[1:], os.environ)
    except ConfigError as error:
        for line in error.problems:
            say(line)
        return 2


if __name__ == "__main__":
    sys.exit(main())
