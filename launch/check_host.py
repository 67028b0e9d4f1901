"""What launch/preflight.sh does on a host: python launch/check_host.py VERB, a JSON object on stdin, one on stdout.

    facts     of the machine: Python, packages, code, cores, memory, GPUs, limits
    view      what a rank there would make of the command line: its config, folders and needs of memory and disk
    write     leave a token in the shared folders; read: all hosts' tokens; clear: take it away again
    clock     a line `time SECONDS` for each line that comes in
    rates     run this host's ranks of the probe (check_rates.py)
    look, meet: launch/on_host.py's

Each runs in the environment that a rank there would have. `facts` imports nothing but Python's own library, so that it
answers where packages are missing. Not here: what the answers mean (preflight_checks.py and beside).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

ROOMS = ("conf", "corpus", "engine", "launch", "model", "parallel", "recipes", "telemetry")
CODE = (".py", ".yaml", ".sh")
READ_S = 5.0  # how long tokens may take to be seen: what a network file system keeps of a folder's list goes stale
TOKEN = ".preflight-{id}-{node}"


def facts(order: dict[str, Any]) -> dict[str, Any]:
    from launch.check_gpus import gpus
    from launch.machine import MEMORY, machine

    found, problem = gpus()
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": {name: _version(name) for name in _required(ROOT / "requirements.txt")},
        "code": _code(Path(order["recipe"])),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _available_memory(),
        "shm": shutil.disk_usage(MEMORY).free if os.path.isdir(MEMORY) else 0,
        "machine": machine(),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "gpus": found,
        "gpu_problem": problem,
    }


def _required(path: Path) -> list[str]:
    names = (re.match(r"[A-Za-z0-9][\w.-]*", line.strip()) for line in path.read_text().splitlines())
    return [match[0] for match in names if match]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _code(recipe: Path) -> dict[str, str]:
    """Path -> hash of every file that a run reads its code or config from."""
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*") if path.suffix in CODE]
    paths += [ROOT / "requirements.txt", recipe]
    return {
        str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path): _hash(path.read_bytes())
        for path in sorted(set(paths))
    }


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def _available_memory() -> int:
    """Bytes that processes may still take: the machine's, or this control group's where that is less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    left = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    own = next((line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line[:3] == "0::"), "/")
    group = Path("/sys/fs/cgroup") / own.strip("/")
    for folder in (group, *group.parents):
        limit, used = folder / "memory.max", folder / "memory.current"
        if limit.is_file() and (most := limit.read_text().strip()) != "max":
            left.append(int(most) - int(used.read_text()))
    return min(left)


def view(order: dict[str, Any]) -> dict[str, Any]:
    from conf.cli import compose_config, parse_flags
    from conf.load import ConfigError, fingerprint, leaves
    from launch.environment import travelling
    from launch.needs import needs
    from parallel.hardware import device_count, device_kind
    from telemetry.redact import redacted
    from telemetry.run_folder import git_commit

    if not os.path.isdir(order["folder"]):
        return {"problem": f"it has no folder {order['folder']}; mount it there, or call from a shared one"}
    os.chdir(order["folder"])
    device = device_kind()
    try:
        flags = parse_flags(order["overrides"])
        config = compose_config(flags.overrides, config_dir=flags.config_dir)
        needed = needs(config, order["ranks"], world_size=order["world_size"], device=device)
    except ConfigError as error:
        return {"problem": "; ".join(error.problems)}
    run, cache = (Path(name).expanduser().absolute() for name in (config.run.dir, config.data.cache_dir))
    return {
        "commit": git_commit(),
        "environ": {name: _hash(os.fsencode(value)) for name, value in travelling(os.environ).items()},
        "fingerprint": fingerprint(config),
        "knobs": redacted({key: str(value) for key, value in leaves(config)}),
        "device": device,
        "devices": device_count(),
        "needs": needed,
        "free": shutil.disk_usage(next(path for path in (run, *run.parents) if path.is_dir())).free,
        "folders": {"run folder": str(run), "corpus folder": str(cache)},
    }


def write(order: dict[str, Any]) -> dict[str, Any]:
    """In each of `folders`, which the run would make as well."""
    problems = {}
    for name, folder in order["folders"].items():
        try:
            os.makedirs(folder, exist_ok=True)
            with open(_token(folder, order, order["node"]), "w") as file:
                file.write(order["tokens"][order["node"]])
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            problems[name] = error.strerror
    return {"problems": problems}


def read(order: dict[str, Any]) -> dict[str, Any]:
    """Nodes whose token is not seen here, by folder."""
    deadline = time.monotonic() + READ_S
    while True:
        unseen = {
            name: [node for node, token in enumerate(order["tokens"]) if not _seen(folder, order, node, token)]
            for name, folder in order["folders"].items()
        }
        if not any(unseen.values()) or time.monotonic() > deadline:
            return {"unseen": unseen}
        time.sleep(0.5)


def _token(folder: str, order: Mapping[str, Any], node: int) -> Path:
    return Path(folder) / TOKEN.format(id=order["id"], node=node)


def _seen(folder: str, order: Mapping[str, Any], node: int, token: str) -> bool:
    path = _token(folder, order, node)
    return path.is_file() and path.read_text() == token


def clear(order: dict[str, Any]) -> dict[str, Any]:
    for folder in order["folders"].values():
        _token(folder, order, order["node"]).unlink(missing_ok=True)
    return {}


def clock() -> None:
    for _ in sys.stdin:
        print("time", time.time(), flush=True)


def answer(verb: str, order: dict[str, Any]) -> dict[str, Any]:
    verbs: dict[str, Callable[[dict[str, Any]], dict[str, Any]]]
    verbs = {"facts": facts, "view": view, "write": write, "read": read, "clear": clear}
    if verb not in verbs:
        from launch import check_rates, on_host  # they need packages

        verbs = {"look": on_host.look, "meet": on_host.meet, "rates": check_rates.rates}
    return verbs[verb](order)


def in_the_ranks_environment(verb: str, order: dict[str, Any]) -> int:
    """Once more, as some variables are read when Python starts. PYTHONPATH is the caller's or none, as for ranks."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | order.pop("environ")
    command = [sys.executable, __file__, verb]
    return subprocess.run(command, input=json.dumps(order), env=environ, text=True).returncode


if __name__ == "__main__":
    if sys.argv[1] == "clock":
        clock()
    elif "environ" in (given := json.load(sys.stdin)):
        sys.exit(in_the_ranks_environment(sys.argv[1], given))
    else:
        print(json.dumps(answer(sys.argv[1], given)))
