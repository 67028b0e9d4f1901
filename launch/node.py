"""What launch/node.sh does: one host's part of a run, through `deepspeed --no_ssh`, started by another on each host.

Not here: how the hosts find each other (meeting.py), what is done with a host's processes (on_host.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from conf import interrupts

    interrupts.while_imports_run()

from conf.hostfile import Slots, ranks
from conf.load import ConfigError
from launch import environment, meeting, on_host
from launch.ask import check_address
from launch.remote import ROOT
from launch.request import Request, check_given, choose_hosts, composed, require_plan
from launch.request import parse as parse_request
from launch.slurm_names import expand_counts
from launch.watch import GRACE_S, STOP_CODES, UNHANDLED, ended_with

DEFAULT_PORT = "29500"
DEFAULT_WAIT_S = "300"
USAGE = (
    "usage: launch/node.sh HOSTFILE [-i INCLUDE] [-e EXCLUDE] [--node_rank N] [--interface NAME] [--wait SECONDS] "
    "RECIPE OVERRIDES..."
)
OF_ALL = (0, 2, 75, 76, 130, 143)  # exit codes that no single host is the cause of
TELL_S = 5.0  # for another host's end to be told, once this one's ranks have failed
STOPS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
# A scheduler signals all of a host's processes. The launcher's ignore that; the ranks, which would inherit it, do not.
AS_USUAL = (
    "import os, sys; from signal import *; [signal(n, SIG_DFL) for n in (SIGUSR1, SIGTERM, SIGINT)]; "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


@dataclass(frozen=True)
class Node:
    """The command line. number: its --node_rank, where it has one."""

    request: Request
    number: int | None
    wait_s: float


@dataclass
class Part:
    """This host's part of a run. order: what on_host.py's verbs take."""

    hosts: tuple[str, ...]
    node: int
    met: meeting.Met
    order: dict[str, Any]
    requests: list[signal.Signals] = field(default_factory=list)


def parse(argv: Sequence[str]) -> Node:
    request = parse_request(argv, usage=USAGE, more=("node_rank=", "wait="))
    number, wait = request.more.get("node_rank"), request.more.get("wait", DEFAULT_WAIT_S)
    if request.ssh_port is not None:
        raise ConfigError([f"-p {request.ssh_port}: no ssh is used here; leave it out"])
    if number is not None and not number.isdecimal():
        raise ConfigError([f"--node_rank {number} is not a number; give the host's line in the hostfile, from 0"])
    if not wait.isdecimal():
        raise ConfigError([f"--wait {wait} is not a number of seconds"])
    return Node(request, None if number is None else int(number), float(wait))


def which(node: Node, hosts: Slots) -> int:
    """Which of the hosts this one is."""
    if node.number is not None:
        if node.number >= len(hosts):
            raise ConfigError([f"--node_rank {node.number}: {', '.join(hosts)} are 0 to {len(hosts) - 1}"])
        return node.number
    names = {os.environ.get("SLURMD_NODENAME", ""), socket.gethostname(), socket.getfqdn()}
    named = [number for number, host in enumerate(hosts) if host.rpartition("@")[2] in names]
    found = named or [number for number, host in enumerate(hosts) if _is_mine(host.rpartition("@")[2])]
    if len(found) != 1:
        raise ConfigError([
            f"which of {', '.join(hosts)} is {socket.gethostname()}? neither its name nor its addresses say; give "
            "--node_rank"
        ])  # fmt: skip
    return found[0]


def _is_mine(host: str) -> bool:
    with contextlib.suppress(OSError):
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)}
        return bool(addresses & {one for ones in on_host.addresses().values() for one in ones})
    return False


def place(
    node: Node, hosts: Slots, number: int, *, given: str | None, port: int
) -> tuple[meeting.Met, str, dict[str, str]]:
    """All hosts, met; the master's address, and the environment of this host's ranks."""
    names, named = [host.rpartition("@")[2] for host in hosts], node.request.interface
    seen = on_host.look({"folder": os.getcwd(), "interface": named, "peers": [], "port": None})
    if "problem" in seen:
        raise ConfigError([f"host {names[number]}: {seen['problem']}"])
    if number == 0 and given is not None:
        check_address(given, seen["addresses"], names[0])
    met = meet(node, hosts, number, master=given or names[0], port=port)
    address, interface = seen["address"], seen["interface"]
    if met.links and named is None:
        address = met.addresses()[0]
        if len(met.addresses()) > 1:
            ways = ", ".join(met.addresses())
            raise ConfigError([f"host {names[number]}: it reaches the others from {ways}; name one with --interface"])
        interface = next((name for name, ones in seen["addresses"].items() if address in ones), None)
    master = given or (address if number == 0 else names[0])
    given_here = {**os.environ, **environment.of_files(os.environ)}
    return met, master, environment.with_network(given_here, interface, named=named is not None)


def devices(slots: Sequence[int], environ: Mapping[str, str]) -> list[str]:
    """`env` with the devices of these slots, where this host shows some of its GPUs only: DeepSpeed numbers all."""
    mask = [one for one in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    if not mask or environ.get("DS_ACCELERATOR") == "cpu":
        return []
    if slots[-1] >= len(mask):
        shown = f"CUDA_VISIBLE_DEVICES={','.join(mask)}"
        raise ConfigError([f"slot {slots[-1]} but {shown} shows {len(mask)} GPUs; give the host {len(mask)} slots"])
    return ["env", f"CUDA_VISIBLE_DEVICES={','.join(mask[slot] for slot in slots)}"]


def command_of(request: Request, hosts: Slots, number: int, *, master: str, port: str) -> list[str]:
    kept = "@".join(f"{name}:{','.join(map(str, slots))}" for name, slots in hosts.items())
    command = [str(Path(sys.executable).with_name("deepspeed")), "--quiet", "--hostfile", str(request.hostfile)]
    command += ["--include", kept] if request.include or request.exclude else []
    command += ["--no_ssh", "--node_rank", str(number), "--master_addr", master, "--master_port", port]
    return [*command, "--no_python", str(ROOT / "launch" / "rank.sh")]


def launch_part(node: Node) -> int:
    check_started_once()
    request = node.request
    hosts = choose_hosts(request)
    require_plan(request.recipe, composed(request.recipe, request.overrides), hosts)
    check_given()
    number, names = which(node, hosts), list(hosts)
    given, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", DEFAULT_PORT)
    rank = [*devices(hosts[names[number]], os.environ), sys.executable, "-u", str(request.recipe), *request.overrides]
    print(f"node {number} of {', '.join(hosts)}, {ranks(hosts)} ranks, each: {shlex.join(rank)}")
    if os.environ.get("DRY_RUN", "0") == "1":
        print(shlex.join(command_of(request, hosts, number, master=given or names[0], port=port)))
        return 0
    sys.stdout.flush()
    met, master, environ = place(node, hosts, number, given=given, port=int(port))
    command = command_of(request, hosts, number, master=master, port=port)
    print(shlex.join(command), flush=True)
    launch = secrets.token_hex(4)
    order: dict[str, Any] = {
        "id": launch, "node": number, "path": environment.path_of(launch, str(number)),
        "marker": environment.marker_of(launch),
    }  # fmt: skip
    environ |= {
        "LAUNCH_ID": launch, "LAUNCH_NODE": str(number), "LAUNCH_MARKER": order["marker"], "LAUNCH_FOLDER": os.getcwd(),
        "LAUNCH_COMMAND": shlex.join([sys.executable, "-ISc", AS_USUAL, *rank]),
    }  # fmt: skip
    return run(Part(tuple(hosts), number, met, order), command, environ)


def check_started_once() -> None:
    """Under srun: one task a host, as each would start all of the host's ranks."""
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    if max(expand_counts(tasks)) > 1:
        raise ConfigError([
            f"srun started {tasks} tasks a host and each would start all ranks of it; give srun --ntasks-per-node=1, "
            "or submit launch/slurm.sbatch, which takes either"
        ])  # fmt: skip


def meet(node: Node, hosts: Slots, number: int, *, master: str, port: int) -> meeting.Met:
    told = json.dumps([hosts, node.request.recipe.name, node.request.overrides])
    words, names = hashlib.sha256(told.encode(errors="surrogateescape")).hexdigest(), list(hosts)
    if len(hosts) == 1:
        meeting.listening(port).close()
        return meeting.Met(names, number)
    if number == 0:
        return meeting.gather(names, address=master, port=port, words=words, seconds=node.wait_s)
    return meeting.join(names, number, address=master, port=port, words=words, seconds=node.wait_s)


def run(part: Part, command: Sequence[str], environ: Mapping[str, str]) -> int:
    """The exit code; no process of the launch is left on this host."""
    for number in STOPS:
        signal.signal(number, lambda n, frame: part.requests.append(signal.Signals(n)))
    launcher = subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_as_launcher
    )
    try:
        code = _wait(part, launcher)
    finally:
        order = part.order | {"asked": bool(part.requests), "early": launcher.poll() is None}
        finished = on_host.end(order)["finished"]
        launcher.wait()
    if code == 0 and part.node == 0 and not finished:
        say("the launcher ended but rank 0 did not finish: some process was killed")
        code = 1
    code = _stop_code(part.requests, code)
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)  # nothing runs here any more
    code = part.met.end(code, patience_s=GRACE_S)
    if code in OF_ALL or (failure := part.met.first_failure(patience_s=TELL_S)) is None:
        return code
    if code == 1 and failure.code == 75:  # asked to stop while nothing trained, which the ranks here saw as lost peers
        return 75
    say(f"host {failure.host} {'is lost' if failure.code is None else ended_with(failure.code)}")
    return code


def _as_launcher() -> None:
    """In the child: end with this process even if that is killed, and leave requests to stop to the ranks."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def _wait(part: Part, launcher: subprocess.Popen[bytes]) -> int:
    """Until it ends, or a second request or another host's failure ends it."""
    handled = 0
    while launcher.poll() is None:
        time.sleep(0.2)
        if len(part.requests) > handled:
            handled += 1
            stop_code = STOP_CODES[part.requests[0]]
            if handled > 1:
                return stop_code
            # Schedulers signal the ranks too. The same signal again would end them at once, another one does not.
            other = signal.SIGTERM if part.requests[0] is signal.SIGUSR1 else signal.SIGUSR1
            if not on_host.ask(part.order | {"signal": other.name})["asked"]:
                return stop_code  # nothing runs yet
        failure = part.met.failure
        if failure is not None and time.monotonic() - failure.at > GRACE_S:
            say(f"the ranks of {part.hosts[part.node]} did not end within {GRACE_S:g} s of another host's failure")
            return failure.code or 1
    return launcher.returncode if launcher.returncode >= 0 else 1


def _stop_code(requests: Sequence[signal.Signals], code: int) -> int:
    if not requests:
        return code
    if code in (*UNHANDLED, 256 - signal.SIGTERM):  # of ranks that did not train yet and knew no signal
        return STOP_CODES[requests[0]]
    return 75 if code == 143 and requests == [signal.SIGUSR1] else code  # which they got as SIGTERM


def say(text: str) -> None:
    print(f"launch/node.sh: {text}", file=sys.stderr, flush=True)


def main() -> int:
    try:
        return launch_part(parse(sys.argv[1:]))
    except ConfigError as error:
        for line in error.problems:
            say(line)
        return 2
    except meeting.AbsentError as error:
        say(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
