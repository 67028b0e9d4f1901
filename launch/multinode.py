"""What launch/multinode.sh does: a recipe on the hosts of a hostfile, through DeepSpeed's launcher over pdsh.

Every fault that can be known before is told before anything starts. While the run goes on this process watches it
(watch.py), when it ends, it ends what is left on every host, and starts it again where it may (restarts.py). Not here:
what travels (environment.py), how hosts are reached (remote.py), what is done on one (on_host.py).
"""

from __future__ import annotations

import getopt
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conf import hostfile
from conf.cli import compose_config, parse_flags
from conf.load import ConfigError, range_problems
from conf.schema import Config
from launch import environment, restarts, watch
from launch.ask import Asked, ask_hosts, who_answers
from launch.remote import ROOT, Answer, Ssh, patience
from launch.replan import Planned, ranks
from launch.restarts import Policy, first_hosts, pick
from launch.watch import LOST_AFTER_S, Ended, Job

LEAST_S = 5.0  # a host that works hard may be silent for seconds
USAGE = (
    "usage: launch/multinode.sh HOSTFILE [-i INCLUDE] [-e EXCLUDE] [-p SSH_PORT] [--interface NAME] [--hosts N] "
    "[-r RESTARTS] [--no-replan] [--lost-after SECONDS] RECIPE OVERRIDES..."
)


@dataclass(frozen=True)
class Request:
    """The command line."""

    hostfile: Path
    include: str
    exclude: str
    ssh_port: str | None
    interface: str | None
    recipe: Path
    overrides: tuple[str, ...]
    hosts: int | None = None  # to use of the hostfile's; None: all
    restarts: int = 0
    replan: bool = True
    lost_after_s: float = LOST_AFTER_S


def parse(argv: Sequence[str]) -> Request:
    """Options may stand before and after HOSTFILE; all behind RECIPE is the recipe's."""
    long = ["include=", "exclude=", "ssh_port=", "interface=", "hosts=", "no-replan", "lost-after="]
    try:
        before, rest = getopt.getopt(argv, "i:e:p:r:", long)
        after, words = getopt.getopt(rest[1:], "i:e:p:r:", long)
    except getopt.GetoptError as error:
        raise ConfigError([f"{error}; {USAGE}"]) from None
    if not words:
        raise ConfigError([USAGE])
    names = {"-i": "--include", "-e": "--exclude", "-p": "--ssh_port"}
    given = {names.get(name, name): value for name, value in [*before, *after]}
    port = given.get("--ssh_port")
    if port is not None and not (port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError([f"-p {port} is not a port; give 1 to 65535"])
    count, restarts, lost = given.get("--hosts"), given.get("-r", "0"), given.get("--lost-after", f"{LOST_AFTER_S:g}")
    if count is not None and not (count.isdigit() and int(count) > 0):
        raise ConfigError([f"--hosts {count} is not a number of hosts; give 1 or more"])
    if not restarts.isdigit():
        raise ConfigError([f"-r {restarts} is not a number of restarts; give 0 or more"])
    if not (re.fullmatch(r"\d+(\.\d+)?", lost) and float(lost) >= LEAST_S):
        raise ConfigError([f"--lost-after {lost} is not a time in seconds; give {LEAST_S:g} or more"])
    recipe = Path(words[0]) if Path(words[0]).is_file() else ROOT / words[0]
    if not recipe.is_file():
        raise ConfigError([f"there is no recipe {words[0]}; see recipes/"])
    overrides = list(words[1:])
    if not any(word.startswith("resume=") for word in overrides):
        overrides.append("resume=auto")
    return Request(
        Path(rest[0]).absolute(), given.get("--include", ""), given.get("--exclude", ""), port,
        given.get("--interface"), recipe.absolute(), tuple(overrides), None if count is None else int(count),
        int(restarts), "--no-replan" not in given, float(lost),
    )  # fmt: skip


def choose_hosts(request: Request) -> hostfile.Slots:
    """What the hostfile and the filters give."""
    hosts = hostfile.chosen(hostfile.read(request.hostfile), include=request.include, exclude=request.exclude)
    if request.hosts is not None and request.hosts > len(hosts):
        raise ConfigError(
            [f"--hosts {request.hosts} but there are {len(hosts)} ({', '.join(hosts)}); give at most that"]
        )
    return hosts


def composed(request: Request) -> Config:
    flags = parse_flags(request.overrides)
    config = compose_config(flags.overrides, config_dir=flags.config_dir)
    problems = range_problems(config)
    if problems:
        raise ConfigError(problems)
    return config


def require_plan(config: Config, hosts: hostfile.Slots) -> None:
    """ConfigError where the configured plan cannot use these slots."""
    problem = hostfile.plan_problem(hosts, tp=config.parallel.tp, pp=config.parallel.pp)
    if problem is not None:
        raise ConfigError([problem])


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
        network = answer.values["interface"]
        chosen = {} if network is None else {"NCCL_SOCKET_IFNAME": network, "GLOO_SOCKET_IFNAME": network}
        if request.interface is not None:
            found.append(shared | chosen | {"LAUNCH_NODE": str(number)})
        else:
            found.append(chosen | shared | {"LAUNCH_NODE": str(number)})
    return found


def launch_run(request: Request) -> int:
    config, hosts = composed(request), choose_hosts(request)
    check_given()
    options = [
        os.environ.get("PDSH_SSH_ARGS_APPEND", ""),
        f"-p {request.ssh_port}" if request.ssh_port else "",
        patience(request.lost_after_s),
    ]
    ssh = Ssh(" ".join(option for option in options if option))
    launch = secrets.token_hex(4)
    count = request.hosts or len(hosts)
    first = pick(hosts, answering=list(hosts), count=count, failures={})
    if os.environ.get("DRY_RUN", "0") == "1":
        require_plan(config, first)
        master = os.environ.get("MASTER_ADDR", f"ADDRESS_OF_{next(iter(first))}")
        port = os.environ.get("MASTER_PORT", "FREE")
        show(request, first, request.overrides, master=master, port=port, launch=launch)
        return 0
    if shutil.which("pdsh") is None:
        raise ConfigError(["pdsh is not installed here; install it (apt install pdsh, dnf install pdsh-rcmd-ssh)"])

    def start(plan: Planned, words: Sequence[str], number: int, restart: Mapping[str, Any] | None) -> tuple[Job, Ended]:
        answers, master, port = ask_hosts(plan.hosts, ssh, interface=request.interface)
        attempt = f"{launch}-{number}"
        values = variables(request, answers, attempt, words=words, restart=restart)
        command = show(request, plan.hosts, words, master=master, port=port, launch=attempt)
        environ = environment.for_the_launcher(os.environ, ssh_options=ssh.options)
        slots = tuple(map(len, plan.hosts.values()))
        job = Job(attempt, tuple(plan.hosts), slots, tuple(command), environ, ssh, request.lost_after_s)
        return job, watch.run(job, values)

    def ask() -> Asked:
        return who_answers(choose_hosts(request), ssh, interface=request.interface)  # the hostfile is read again

    if count < len(hosts):
        first = first_hosts(ask(), count)
    require_plan(config, first)
    policy = Policy(count, request.restarts, request.replan, request.overrides)
    return restarts.run(config, first, policy, ask=ask, start=start)


def show(
    request: Request, hosts: hostfile.Slots, words: Sequence[str], *, master: str, port: str, launch: str
) -> list[str]:
    """Print what each rank and the launcher are given; the launcher's command."""
    command = command_of(request, hosts, master=master, port=port, launch=launch)
    print(f"{ranks(hosts)} ranks on {', '.join(hosts)}, each: {shlex.join([str(request.recipe), *words])}")
    print(shlex.join(command), flush=True)
    return command


def check_given() -> None:
    """MASTER_ADDR, MASTER_PORT and a device mask, where the caller's environment has them."""
    if os.environ.get("MASTER_ADDR") == "":
        raise ConfigError(["MASTER_ADDR is empty; give an address of the first host, or unset it"])
    port = os.environ.get("MASTER_PORT", "0")
    if not (port.isdigit() and int(port) < 65536):
        raise ConfigError([f"MASTER_PORT={port} is not a port; give 1 to 65535, or unset it"])
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mask is not None:
        print(
            f"CUDA_VISIBLE_DEVICES={mask} is this machine's and not sent; choose devices with -i HOST:0,1",
            file=sys.stderr,
        )


def main() -> int:
    try:
        return launch_run(parse(sys.argv[1:]))
    except ConfigError as error:
        print("\n".join(f"launch/multinode.sh: {line}" for line in error.problems), file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before anything started
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(75))  # while nothing runs there is nothing to save
    sys.exit(main())
