"""The hosts that the other tests of this folder stand on are apart from each other, and go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.hosts import Hosts

ROOT = Path(__file__).resolve().parents[2]


def ssh(hosts: Hosts, source: int, target: str, command: str) -> str:
    return hosts[source].run(["ssh", *hosts.ssh_options.split(), target, command])


def test_each_host_has_its_own_name_network_and_processes(hosts):
    assert [host.run(["hostname"]).strip() for host in (hosts[0], hosts[1])] == ["w0", "w1"]
    assert ssh(hosts, 0, "w1", "hostname; getent hosts w0") == "w1\n10.77.0.1       w0\n"
    addresses = hosts[0].run(["ip", "-o", "-4", "address"])
    assert "10.77.0.1/24" in addresses and "10.77.0.2" not in addresses
    started = hosts[0].start(["sleep", "60"], folder=Path("/"), output=Path(os.devnull), environ={})
    try:
        end = time.monotonic() + 10
        while not hosts[0].processes():
            assert time.monotonic() < end
        assert [process.name() for process in hosts[0].processes()] == ["sleep"] and hosts[1].processes() == []
    finally:
        hosts[0].signal(started, signal.SIGKILL)
        started.wait()


def test_nothing_leaves_and_a_cut_host_is_not_reached(hosts):
    assert hosts[0].run(["ip", "route", "show", "default"]) == ""
    hosts[1].link("down")
    try:
        with pytest.raises(AssertionError):
            hosts[0].run(["ssh", *hosts.ssh_options.split(), "-o", "ConnectTimeout=1", "w1", "true"])
    finally:
        hosts[1].link("up")


def test_a_slow_link_is_slow(hosts):
    def seconds() -> float:
        start = time.monotonic()
        sent = hosts[1].run(["bash", "-c", f"head -c 200000 /dev/zero | ssh {hosts.ssh_options} w0 wc -c"])
        assert sent == "200000\n"
        return time.monotonic() - start

    hosts[0].rate(800)  # 1.6 Mbit in 2 s
    try:
        slow = seconds()
    finally:
        hosts[0].rate(None)
    assert slow > 1.5 > seconds()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_hosts_end_with_the_process_that_made_them(allowed, tmp_path, ending):
    code = f"""
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.cluster.hosts import Hosts
with Hosts(2, Path({str(tmp_path / "hosts")!r})) as hosts:
    print(*(host.pid for host in hosts), flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2 and all(map(psutil.pid_exists, pids))
    process.send_signal(ending)
    process.wait()
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=10)
    assert not any(map(psutil.pid_exists, pids))
