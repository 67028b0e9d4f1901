"""What launch/multinode.sh does: a recipe on the hosts of a hostfile, through DeepSpeed's launcher over pdsh.

Every fault that can be known before is told before anything starts. While the run goes on this process watches it, and
when it ends, it ends what is left on every host. Not here: what travels (environment.py), how hosts are reached
(remote.py), what is done on one (on_host.py).
"""

from __future__ import annotations

import getopt
import os
import re
import secrets
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conf import hostfile
from conf.cli import compose_config, parse_flags
from conf.load import ConfigError, range_problems
from launch import environment, openmpi
from launch.remote import PATIENCE, ROOT, Answer, Ssh
from launch.watch import Job, run

REACH_S = 5.0  # for the port of rank 0
LAUNCHERS = ("pdsh", "openmpi")
USAGE = (
    "usage: launch/multinode.sh HOSTFILE [-i INCLUDE] [-e EXCLUDE] [-p SSH_PORT] [--interface NAME] "
    "[--launcher openmpi] RECIPE OVERRIDES..."
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
    launcher: str = "pdsh"


def parse(argv: Sequence[str]) -> Request:
    """Options may stand before and after HOSTFILE; all behind RECIPE is the recipe's."""
    long = ["include=", "exclude=", "ssh_port=", "interface=", "launcher="]
    try:
        before, rest = getopt.getopt(argv, "i:e:p:", long)
        after, words = getopt.getopt(rest[1:], "i:e:p:", long)
    except getopt.GetoptError as error:
        raise ConfigError([f"{error}; {USAGE}"]) from None
    if not words:
        raise ConfigError([USAGE])
    names = {"-i": "--include", "-e": "--exclude", "-p": "--ssh_port"}
    given = {names.get(name, name): value for name, value in [*before, *after]}
    port = given.get("--ssh_port")
    if port is not None and not (port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError([f"-p {port} is not a port; give 1 to 65535"])
    launcher = given.get("--launcher", "pdsh")
    if launcher not in LAUNCHERS:
        raise ConfigError([f"--launcher {launcher} is not offered; use {' or '.join(LAUNCHERS)}"])
    recipe = Path(words[0]) if Path(words[0]).is_file() else ROOT / words[0]
    if not recipe.is_file():
        raise ConfigError([f"there is no recipe {words[0]}; see recipes/"])
    overrides = list(words[1:])
    if not any(word.startswith("resume=") for word in overrides):
        overrides.append("resume=auto")
    return Request(
        Path(rest[0]).absolute(), given.get("--include", ""), given.get("--exclude", ""), port,
        given.get("--interface"), recipe.absolute(), tuple(overrides), launcher,
    )  # fmt: skip


def choose_hosts(request: Request) -> hostfile.Slots:
    """What the hostfile and the filters give, where the configured plan can use it."""
    hosts = hostfile.chosen(hostfile.read(request.hostfile), include=request.include, exclude=request.exclude)
    flags = parse_flags(request.overrides)
    config = compose_config(flags.overrides, config_dir=flags.config_dir)
    problems = range_problems(config)
    if not problems:
        problem = hostfile.plan_problem(hosts, tp=config.parallel.tp, pp=config.parallel.pp)
        problems = [] if problem is None else [problem]
    if problems:
        raise ConfigError(problems)
    return hosts


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
    if request.include or request.exclude:
        kept = "@".join(f"{name}:{','.join(map(str, slots))}" for name, slots in hosts.items())
        command += ["--include", kept]
    return [*command, *(word for pair in fixed.items() for word in pair), script]


def ask_hosts(request: Request, hosts: hostfile.Slots, ssh: Ssh) -> tuple[list[Answer], str, str]:
    """Every host's answer, and the master's address and port; ConfigError with what each host lacks."""
    names = ssh.addresses(list(hosts))
    given, address = int(os.environ.get("MASTER_PORT", "0")), os.environ.get("MASTER_ADDR")
    orders = {
        host: {
            "folder": os.getcwd(), "interface": request.interface,
            "peers": [names[peer] for peer in hosts if peer != host], "port": given if number == 0 else None,
        }
        for number, host in enumerate(hosts)
    }  # fmt: skip
    answers = told(ssh, "look", orders)
    first = answers[0]
    mine = [one for ones in first.values["addresses"].values() for one in ones]
    if address is not None and address not in mine and re.fullmatch(r"[0-9.]+|[0-9a-fA-F:]*:[0-9a-fA-F:]*", address):
        raise ConfigError(
            [f"MASTER_ADDR={address} is no address of {first.host}, where rank 0 runs; it has {', '.join(mine)}"]
        )
    master, port = address or first.values["address"], first.values["port"]
    meeting = {"address": master, "port": port, "seconds": REACH_S}
    told(ssh, "meet", {host: meeting | {"knocks": len(hosts) - 1 if host == first.host else None} for host in hosts})
    return answers, master, str(port)


def told(ssh: Ssh, verb: str, orders: Mapping[str, Mapping[str, Any]]) -> list[Answer]:
    """The hosts' answers. Raises ConfigError with a line for each that has a problem."""
    answers = ssh.call(verb, orders)
    problems = [f"host {one.host}: {one.problem}" for one in answers if one.problem is not None]
    if problems:
        raise ConfigError(problems)
    return answers


def variables(request: Request, answers: Sequence[Answer], launch: str) -> list[dict[str, str]]:
    """The environment of each host's ranks."""
    shared = environment.travelling(os.environ) | environment.of_files(os.environ)
    path = shared.pop("PYTHONPATH", None)
    rank = ["env", *(["-u", "PYTHONPATH"] if path is None else [f"PYTHONPATH={path}"]), sys.executable, "-u"]
    shared |= {
        "LAUNCH_ID": launch,
        "LAUNCH_MARKER": environment.marker_of(launch),
        "LAUNCH_FOLDER": os.getcwd(),
        "LAUNCH_COMMAND": shlex.join([*rank, str(request.recipe), *request.overrides]),
    }
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
    hosts = choose_hosts(request)
    check_given()
    options = [
        os.environ.get("PDSH_SSH_ARGS_APPEND", ""),
        f"-p {request.ssh_port}" if request.ssh_port else "",
        PATIENCE,
    ]
    ssh = Ssh(" ".join(option for option in options if option))
    launch = secrets.token_hex(4)
    dry = os.environ.get("DRY_RUN", "0") == "1"
    if dry:
        master, port = (
            os.environ.get("MASTER_ADDR", f"ADDRESS_OF_{next(iter(hosts))}"),
            os.environ.get("MASTER_PORT", "FREE"),
        )
    else:
        if request.launcher == "openmpi":
            openmpi.require()
        elif shutil.which("pdsh") is None:
            raise ConfigError(["pdsh is not installed here; install it (apt install pdsh, dnf install pdsh-rcmd-ssh)"])
        answers, master, port = ask_hosts(request, hosts, ssh)
        values = variables(request, answers, launch)
    mpi = request.launcher == "openmpi"
    if mpi:
        command = openmpi.command_of(hosts, launch=launch, ssh_options=ssh.options, interface=request.interface)
    else:
        command = command_of(request, hosts, master=master, port=port, launch=launch)
    ranks = sum(map(len, hosts.values()))
    print(f"{ranks} ranks on {', '.join(hosts)}, each: {shlex.join([str(request.recipe), *request.overrides])}")
    print(shlex.join(command), flush=True)
    if dry:
        return 0
    if mpi:
        values = openmpi.variables(values, hosts, master=master, port=port)
        environ = openmpi.environ(os.environ)
        return run(Job(launch, tuple(hosts), tuple(command), environ, ssh, openmpi.FAILED, shared=True), values)
    environ = environment.for_the_launcher(os.environ, ssh_options=ssh.options)
    return run(Job(launch, tuple(hosts), tuple(command), environ, ssh), values)


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
    sys.exit(main())
