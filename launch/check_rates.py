"""A host's ranks of engine/probe_hosts.py, started beside those of the other hosts: a verb of check_host.py.

They end by themselves, with the first of them that fails, or when their time is over; none is left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Any

from conf.cli import share_cores
from launch.remote import ROOT


def rates(order: dict[str, Any]) -> dict[str, Any]:
    """{"found": ...} on the first host. after: seconds to a problem, as the first one to have it may be its cause."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        started = _start(order, output, errors)
        try:
            codes = _wait(started, deadline=began + order["seconds"])
        finally:
            for process in started:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        for file in (output, errors):
            file.seek(0)
        problem = None
        if any(codes):
            problem = f"a rank failed: {(errors.read().strip().splitlines() or [f'code {max(codes)}'])[-1]}"
        elif len(codes) < len(started):
            problem = f"its ranks did not end within {order['seconds']:g} s"
        if problem is not None:
            return {"problem": problem, "after": time.monotonic() - began}
        lines = [line for line in output if line.startswith('{"matrix"')]  # transports may print as well
    return {"found": json.loads(lines[0])} if lines else {}


def _start(order: dict[str, Any], output: IO[str], errors: IO[str]) -> list[subprocess.Popen[bytes]]:
    os.environ["LOCAL_WORLD_SIZE"] = str(len(order["ranks"]))
    share_cores(order["device"])
    environ = {"WORLD_SIZE": str(order["world_size"]), "MASTER_ADDR": order["address"]}
    environ |= {"MASTER_PORT": str(order["port"])}
    if order["device"] == "cuda":
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, order["slots"]))
    command = [sys.executable, "-m", "engine.probe_hosts", json.dumps(order["probe"])]
    return [
        subprocess.Popen(
            command, cwd=ROOT, env=os.environ | environ | {"RANK": str(rank), "LOCAL_RANK": str(local)},
            stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True,
        )
        for local, rank in enumerate(order["ranks"])
    ]  # fmt: skip


def _wait(started: Sequence[subprocess.Popen[bytes]], *, deadline: float) -> list[int]:
    """The codes of those that ended: all, or where one failed or the time is over fewer."""
    while True:
        codes = [code for code in (process.poll() for process in started) if code is not None]
        if len(codes) == len(started) or any(codes) or time.monotonic() > deadline:
            return codes
        time.sleep(0.05)
