"""What launch/multinode.sh does on a host: python launch/on_host.py VERB, a JSON object on stdin, one on stdout.

    look      its address and interface on the route to its peers, a free port; {"problem": ...} where something lacks
    meet      reach the port that rank 0 will serve
    receive   keep the file that the launcher will source
    ask       let the ranks here finish their step and save
    end       end what is left of the launch here; whether rank 0 came to its end
    guard     answer the launcher's signs of life, and do both where they stay away

Of packages it needs psutil only. Whose process is whose stands in its environment: LAUNCH_ID, and LAUNCH_NODE as hosts
may share a machine's process numbers (`all`: of what started the ranks, as mpirun gives all its daemons one
environment). Not here: how a host is reached (remote.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launch.machine import MEMORY, machine
from parallel.hardware import device_kind

TRIES = 15  # of a shared file, 3 s


def look(order: dict[str, Any]) -> dict[str, Any]:
    if not os.path.isdir(order["folder"]):
        return {"problem": f"it has no folder {order['folder']}; the hosts must share the folder that you call from"}
    if "token" in order and not _sees(order["token"]):
        where = os.path.dirname(order["token"])
        return {"problem": f"its {where}, where the runs are kept, is not the launcher's; mount the shared disk there"}
    if not os.access(MEMORY, os.W_OK):
        return {"problem": f"{MEMORY} cannot be written; the start needs a memory file system there"}
    try:
        address, interface = _way(order["peers"], order["interface"])
        found = {"address": address, "interface": interface, "port": _port(order), "addresses": addresses()}
        return found | {"device": device_kind(), "machine": machine()}
    except (OSError, ValueError) as error:
        return {"problem": str(error)}


def _sees(token: str) -> bool:
    """Whether a file that the launcher has just made is here too, where a network's disk may take a moment."""
    for _ in range(TRIES):
        if os.path.exists(token):
            return True
        time.sleep(0.2)
    return False


def _way(peers: list[str], wanted: str | None) -> tuple[str, str | None]:
    """The address and interface by which this host's packets go to its peers, or those of the interface named."""
    if wanted is not None:
        mine = addresses()
        if not mine.get(wanted):
            raise ValueError(f"it has no interface {wanted} with an address; it has {', '.join(sorted(mine))}")
        return mine[wanted][0], wanted
    if not peers:
        return "127.0.0.1", None
    found = {}
    for peer in peers:
        try:
            family, _, _, _, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        except OSError as error:
            raise ValueError(f"it cannot resolve {peer}: {error.strerror}; put it into /etc/hosts or DNS") from None
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing; the kernel picks the route
            found[probe.getsockname()[0]] = peer
    if len(found) > 1:
        ways = ", ".join(f"{peer} from {address}" for address, peer in found.items())
        raise ValueError(f"it reaches its peers over several networks ({ways}); name one with --interface")
    address = next(iter(found))
    return address, next((name for name, ones in addresses().items() if address in ones), None)


def addresses() -> dict[str, list[str]]:
    """interface -> its addresses, IPv4 first."""
    kinds = (socket.AF_INET, socket.AF_INET6)
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        ones = sorted((e for e in entries if e.family in kinds), key=lambda e: e.family != socket.AF_INET)
        if ones:
            found[name] = [entry.address.partition("%")[0] for entry in ones]
    return found


def _port(order: dict[str, Any]) -> int | None:
    """The port asked for, or a free one; None where this host serves none."""
    if order["port"] is None:
        return None
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an ended run's port is free
        try:
            probe.bind(("", order["port"]))
        except OSError as error:
            raise ValueError(f"MASTER_PORT={order['port']} cannot be used: {error.strerror}; unset it") from None
        return int(probe.getsockname()[1])


def meet(order: dict[str, Any]) -> dict[str, Any]:
    """Whether the others reach the master's port: the first host listens there while they knock."""
    deadline = time.monotonic() + order["seconds"]
    if order["knocks"] is not None:
        with socket.create_server(("", order["port"])) as server:
            for _ in range(order["knocks"]):
                server.settimeout(max(0.1, deadline - time.monotonic()))
                with contextlib.suppress(OSError):
                    server.accept()[0].close()
        return {}
    while True:
        try:
            left = max(0.1, deadline - time.monotonic())
            socket.create_connection((order["address"], order["port"]), timeout=left).close()
            return {}
        except OSError as error:
            if time.monotonic() > deadline:
                where = f"{order['address']} port {order['port']}"
                return {"problem": f"it does not reach rank 0's {where} ({error}); open it, or give another network"}
            time.sleep(0.2)


def receive(order: dict[str, Any]) -> dict[str, Any]:
    with os.fdopen(os.open(order["path"], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(order["text"].encode(errors="surrogateescape"))
    return {}


def _processes(order: dict[str, Any]) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            environ = process.environ()
        except psutil.Error:
            continue
        if environ.get("LAUNCH_ID") == order["id"] and environ.get("LAUNCH_NODE") in (str(order["node"]), "all"):
            found.append(process)
    return found


def ask(order: dict[str, Any]) -> dict[str, Any]:
    """Ranks are the launcher's children; their own children have the same environment. signal: by which."""
    asked, number = 0, signal.Signals[order.get("signal", "SIGUSR1")]
    for process in _processes(order):
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            if "RANK" in process.environ() and parent is not None and "RANK" not in parent.environ():
                process.send_signal(number)
                asked += 1
    return {"asked": asked}


def end(order: dict[str, Any]) -> dict[str, Any]:
    finished = os.path.exists(order["marker"])
    for path in (order["path"], order["marker"]):  # without its file a start that is under way fails by itself
        if os.path.exists(path):
            os.remove(path)
    if order["asked"]:
        ask(order)  # the second time means: at once
    ended = _end_processes(order)
    if order["early"]:
        time.sleep(1.0)  # a shell that had read its file then becomes the launcher now
        ended += _end_processes(order)
    return {"finished": finished, "ended": ended}


def guard(order: dict[str, Any]) -> dict[str, Any]:
    """Until the launcher says `done`. Cut off from it, or left alone by it, this host ends its ranks by itself: nobody
    else could, and the run may have gone on without it. First they may save, as where only the launcher is gone.
    """
    while select.select([0], [], [], order["lost_after_s"])[0]:
        said = os.read(0, 4096)
        if b"done" in said:
            return {}
        if not said:
            break
        os.write(1, b"here\n")
    ask(order)
    deadline = time.monotonic() + order["grace_s"]
    while _processes(order) and time.monotonic() < deadline:
        time.sleep(0.5)
    return end(order | {"asked": False, "early": False})


def _end_processes(order: dict[str, Any]) -> int:
    left = _processes(order)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(left, timeout=10)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return len(left)


if __name__ == "__main__":
    verbs = {"look": look, "meet": meet, "receive": receive, "ask": ask, "end": end, "guard": guard}
    with open(0, "rb", buffering=0, closefd=False) as unbuffered:
        line = unbuffered.readline()  # and no byte further, for guard
    print(json.dumps(verbs[sys.argv[1]](json.loads(line))))
