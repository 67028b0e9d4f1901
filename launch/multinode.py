"""What launch/multinode.sh does: a recipe on the hosts of a hostfile, through DeepSpeed's launcher over pdsh.

Every fault that can be known before is told before anything starts. While the run goes on this process watches it
(watch.py), when it ends, it ends what is left on every host, and starts it again where it may (restarts.py). Not here:
what travels (environment.py), how hosts are reached (remote.py), what is done on one (on_host.py).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from conf import interrupts

    interrupts.while_imports_run()

from conf import hostfile, interrupts
from conf.load import ConfigError
from launch import environment, openmpi, restarts, watch
from launch.ask import Asked, ask_hosts, who_answers
from launch.remote import ROOT, Answer, Ssh, ssh_options
from launch.replan import Planned
from launch.request import Request, check_given, check_started_once, composed, enough_hosts, parse, require_plan
from launch.restarts import Policy, first_hosts, pick
from launch.watch import LOST_AFTER_S, Ended, Job

LEAST_S = 5.0  # a host that works hard may be silent for seconds
USAGE = (
    "usage: launch/multinode.sh HOSTFILE [-i INCLUDE] [-e EXCLUDE] [-p SSH_PORT] [--interface NAME] [--preflight] "
    "[--hosts N] [-r RESTARTS] [--no-replan] [--lost-after SECONDS] [--launcher openmpi] RECIPE OVERRIDES..."
)
OPTIONS = ("preflight", "hosts=", "no-replan", "lost-after=", "launcher=")
LAUNCHERS = ("pdsh", "openmpi")


@dataclass(frozen=True)
class Options:
    """Those that only this launcher has."""

    preflight: bool
    restarts: int
    replan: bool
    lost_after_s: float
    mpi: bool  # through OpenMPI's mpirun, not pdsh


def options_of(given: Mapping[str, str]) -> Options:
    """Raises ConfigError."""
    restarts, lost = given.get("r", "0"), given.get("lost-after", f"{LOST_AFTER_S:g}")
    if not restarts.isdecimal():
        raise ConfigError([f"-r {restarts} is not a number of restarts; give 0 or more"])
    if not (re.fullmatch(r"\d+(\.\d+)?", lost) and float(lost) >= LEAST_S):
        raise ConfigError([f"--lost-after {lost} is not a time in seconds; give {LEAST_S:g} or more"])
    launcher = given.get("launcher", "pdsh")
    if launcher not in LAUNCHERS:
        raise ConfigError([f"--launcher {launcher} is not offered; use {' or '.join(LAUNCHERS)}"])
    replan, mpi = "no-replan" not in given, launcher == "openmpi"
    return Options("preflight" in given, int(restarts), replan, float(lost), mpi)


def command_of(request: Request, hosts: hostfile.Slots, *, master: str, port: str, launch: str) -> list[str]:
    """DeepSpeed's runner. Its words reach the hosts' shells unquoted, so that none of the user's is among them."""
    fixed = {"--venv_script": environment.path_of(launch, "%n"), "--master_addr": master, "--master_port": port}
    fixed["--enable_each_rank_log"] = "None --quiet"  # two words there: the runner does not pass its --quiet on
    script = shlex.quote(str(ROOT / "launch" / "rank.sh")).replace("%", "%%")
    if not re.fullmatch(r"[\w./+-]+", sys.executable):
        raise ConfigError(
            [f"{sys.executable}: DeepSpeed's launcher carries no such path; put .venv where it has no blanks"]
        )
    command = [str(Path(sys.executable).with_name("deepspeed")), "--quiet", "--launcher", "pdsh", "--force_multi"]
    command += ["--no_ssh_check", "--no_python", "--hostfile", str(request.hostfile)]
    if hosts != hostfile.read(request.hostfile):
        kept = "@".join(f"{name}:{','.join(map(str, slots))}" for name, slots in hosts.items())
        command += ["--include", kept]
    return [*command, *(word for pair in fixed.items() for word in pair), script]


def variables(
    request: Request, answers: Sequence[Answer], launch: str, *, words: Sequence[str], restart: Mapping[str, Any] | None
) -> list[dict[str, str]]:
    """The environment of each host's ranks. words: the recipe's; restart: what its timeline shall know of one."""
    shared = environment.travelling(os.environ) | environment.of_files(os.environ)
    path = shared.pop("PYTHONPATH", None)
    rank = ["env", *(["-u", "PYTHONPATH"] if path is None else [f"PYTHONPATH={path}"]), sys.executable, "-u"]
    shared |= {
        "LAUNCH_ID": launch,
        "LAUNCH_MARKER": environment.marker_of(launch),
        "LAUNCH_FOLDER": os.getcwd(),
        "LAUNCH_COMMAND": shlex.join([*rank, str(request.recipe), *words]),
    }
    if restart is not None:
        shared["LAUNCH_RESTART"] = json.dumps(restart)
    found = []
    for number, answer in enumerate(answers):
        network, named = answer.values["interface"], request.interface is not None
        found.append(environment.with_network(shared, network, named=named) | {"LAUNCH_NODE": str(number)})
    return found


def launch_run(request: Request, options: Options) -> int:
    check_started_once()
    config, (hosts, count) = composed(request.recipe, request.overrides), enough_hosts(request)
    check_given()
    say_that_a_mask_stays()
    ssh = Ssh(ssh_options(request.ssh_port, lost_after_s=options.lost_after_s))
    launch = secrets.token_hex(4)
    first = pick(hosts, answering=list(hosts), count=count, failures={})
    if os.environ.get("DRY_RUN", "0") == "1":
        require_plan(request.recipe, config, first)
        master = os.environ.get("MASTER_ADDR", f"ADDRESS_OF_{next(iter(first))}")
        port = os.environ.get("MASTER_PORT", "FREE")
        show(request, options, first, request.overrides, ssh, master=master, port=port, launch=launch)
        return 0
    if options.mpi:
        openmpi.require()
    elif shutil.which("pdsh") is None:
        raise ConfigError(["pdsh is not installed here; install it (apt install pdsh, dnf install pdsh-rcmd-ssh)"])

    runs = Path(config.run.dir).expanduser().absolute()

    def start(plan: Planned, words: Sequence[str], number: int, restart: Mapping[str, Any] | None) -> tuple[Job, Ended]:
        answers, master, port = ask_hosts(plan.hosts, ssh, interface=request.interface, runs=runs)
        attempt = f"{launch}-{number}"
        values = variables(request, answers, attempt, words=words, restart=restart)
        command = show(request, options, plan.hosts, words, ssh, master=master, port=port, launch=attempt)
        environ = environment.for_the_launcher(os.environ, ssh_options=ssh.options)
        slots = tuple(map(len, plan.hosts.values()))
        job = Job(attempt, tuple(plan.hosts), slots, tuple(command), environ, ssh, options.lost_after_s)
        if options.mpi:
            values = openmpi.variables(values, plan.hosts, master=master, port=port)
            job = replace(job, environ=openmpi.environ(os.environ), failed=openmpi.FAILED, shared=True)
        return job, watch.run(job, values)

    def ask() -> Asked:
        hosts, _ = enough_hosts(request)  # the hostfile is read again
        return who_answers(hosts, ssh, interface=request.interface)

    if count < len(hosts):
        first = first_hosts(ask(), count)
    require_plan(request.recipe, config, first)
    policy = Policy(count, options.restarts, options.replan, request.overrides)
    return restarts.run(config, first, policy, ask=ask, start=start)


def show(
    request: Request, options: Options, hosts: hostfile.Slots, words: Sequence[str], ssh: Ssh,
    *, master: str, port: str, launch: str,
) -> list[str]:  # fmt: skip
    """Print what each rank and the launcher are given; the launcher's command."""
    if options.mpi:
        command = openmpi.command_of(hosts, launch=launch, ssh_options=ssh.options, interface=request.interface)
    else:
        command = command_of(request, hosts, master=master, port=port, launch=launch)
    print(f"{hostfile.ranks(hosts)} ranks on {', '.join(hosts)}, each: {shlex.join([str(request.recipe), *words])}")
    print(shlex.join(command), flush=True)
    return command


def say_that_a_mask_stays() -> None:
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mask is not None:
        print(
            f"CUDA_VISIBLE_DEVICES={mask} is this machine's and not sent; choose devices with -i HOST:0,1",
            file=sys.stderr,
        )


def preflight(request: Request) -> int:
    """Its exit code. All hosts are checked, spares too."""
    named = {"-i": request.include, "-e": request.exclude, "-p": request.ssh_port, "--interface": request.interface}
    named["--hosts"] = request.more.get("hosts")
    words = [word for name, value in named.items() if value for word in (name, value)]
    script = str(ROOT / "launch" / "preflight.sh")
    command = [script, str(request.hostfile), *words, str(request.recipe), *request.overrides]
    started = subprocess.Popen(command)
    try:
        return started.wait()
    except BaseException:  # asked to end: so is it, which takes away first what it left on the hosts
        started.send_signal(signal.SIGTERM)
        started.wait()
        raise


def main() -> int:
    interrupts.as_usual()
    try:
        request = parse(sys.argv[1:], usage=USAGE, short="r:", more=OPTIONS)
        options = options_of(request.more)
        code = preflight(request) if options.preflight else 0
        if code != 0:
            return 2 if code == 1 else code  # what is red is refused as a bad configuration is
        return launch_run(request, options)
    except ConfigError as error:
        print("\n".join(f"launch/multinode.sh: {line}" for line in error.problems), file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before anything started
        interrupts.tell()
        return 130


if __name__ == "__main__":
    # While nothing runs there is nothing to save, and a preflight that runs is asked to end.
    signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(75))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    sys.exit(main())
