"""launch/preflight.sh over real hosts: nothing is red where nothing is wrong, and each fault is told where it is.

Clocks cannot differ between namespaces of one machine: the host with the wrong one tells another time by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.hosts import Host, Hosts
from tests.cluster.runs import MULTINODE, ROOT, SHOWS, environ, finish
from tests.engine.launched import wait_for

PREFLIGHT = str(ROOT / "launch" / "preflight.sh")
RUN = ["recipes/pretrain.py", "model=llama_tiny", "parallel=tp1", "train.global_batch_size=12"]
PORT = "32555"


@pytest.fixture
def fresh(allowed: None, tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts that a test may break."""
    with Hosts(2, tmp_path / "hosts") as made:
        yield made


def preflight(hosts: Hosts, folder: Path, *words: str, **more: str) -> tuple[int, str, dict[str, Any]]:
    """(code, output, what --json says), called on the first host."""
    hostfile = str(hosts.hostfile(folder / "hostfile")) if not (folder / "hostfile").exists() else "hostfile"
    command = [PREFLIGHT, hostfile, "--json", "found.json", *words, *RUN]
    code, output = finish(hosts[0], command, folder, environ(hosts, **more), timeout=120)
    assert (folder / "found.json").exists(), output
    return code, output, json.loads((folder / "found.json").read_text())["checks"]


def instead(host: Host, path: Path, made: Path, text: str) -> None:
    """The host, and no other, finds `text` in the file."""
    made.write_text(text)
    host.run(["mount", "--bind", str(made), str(path)])


def replaced(path: Path, old: str, new: str) -> str:
    text = path.read_text()
    assert old in text
    return text.replace(old, new)


def test_two_hosts_that_are_well_are_told_so(hosts, tmp_path):
    code, output, found = preflight(hosts, tmp_path, "--quick")
    assert code == 0, output
    assert "preflight: 15 checks on 2 hosts, nothing is wrong" in output and "what to do" not in output
    assert re.search(r"^reachable +w0, w1 +ok$", output, re.MULTILINE) and "\033[" not in output
    assert all(cell["ok"] for cells in found.values() for cell in cells.values())
    assert not list(tmp_path.rglob(".preflight-*")) and hosts.processes() == []


@pytest.fixture(scope="module")
def broken(allowed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str, dict[str, Any], Path]]:
    """One preflight of two hosts, on the second of which nearly everything is wrong, and rank 0's port is taken."""
    folder = tmp_path_factory.mktemp("broken")
    with Hosts(2, folder / "hosts") as made:
        w0, w1 = made[0], made[1]
        break_host(made, w1, folder)
        server = w0.start(
            ["python3", "-m", "http.server", PORT],
            folder=folder, output=folder / "server.txt", environ=environ(made),
        )  # fmt: skip
        wait_for(lambda: f":{PORT} " in w0.run(["ss", "-ltn"]), seconds=20, what="the server")
        made.hostfile(folder / "hostfile", slots=2)
        yield *preflight(made, folder, "--quick", MASTER_PORT=PORT), folder
    server.wait()


def break_host(hosts: Hosts, host: Host, folder: Path) -> None:
    (folder / "runs").mkdir()
    host.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder / "runs")])
    host.run(["mount", "-o", "remount,size=512k", "/dev/shm"])
    metadata = next((ROOT / ".venv").resolve().glob("lib/python*/site-packages/xxhash-*.dist-info/METADATA"))
    instead(host, metadata, folder / "METADATA", re.sub(r"\nVersion: .*", "\nVersion: 0.0.1", metadata.read_text()))
    model = ROOT / "conf" / "model" / "llama_tiny.yaml"
    instead(host, model, folder / "model.yaml", model.read_text() + "norm_epsilon: 1e-3\n")
    verbs = ROOT / "launch" / "check_host.py"
    instead(host, verbs, folder / "verbs.py", replaced(verbs, '"time", time.time()', '"time", time.time() + 7.5'))
    memory = "".join(f"{name}:    1000 kB\n" for name in ("MemTotal", "MemFree", "MemAvailable"))
    instead(host, Path("/proc/meminfo"), folder / "meminfo", memory)
    with (hosts.folder / host.name / "sshd_config").open("a") as file:
        file.write("SetEnv NCCL_DEBUG=INFO\n")
    host.run(["prlimit", "--pid", "1", "--nofile=72:72"])
    host.run(["taskset", "--pid", "--cpu-list", "0", "1"])
    sshd = hosts.folder / host.name / "sshd.log"
    count = sshd.read_text().count("Server listening")
    os.kill(host.pid, signal.SIGHUP)  # sshd, its first process, reads its configuration again
    wait_for(lambda: sshd.read_text().count("Server listening") > count, seconds=20, what="sshd's new start")


@pytest.mark.parametrize(
    ("check", "host", "text", "remedy"),
    [
        ("packages", "w1", r"xxhash 0\.0\.1 here, [3-9][\d.]* on w0", "install requirements.txt"),
        ("code", "w1", r"conf/model/llama_tiny\.yaml, launch/check_host\.py are not as on w0", "git status"),
        ("environment", "w1", "NCCL_DEBUG is set here, unlike on w0", r"\.deepspeed_env"),
        ("config", "w1", r"model\.norm_epsilon=0\.001 here, 1e-05 on w0", "conf/"),
        ("devices", "w1", "2 slots but 1 core", "fewer slots"),
        ("memory", "w1", r"memory: [\d.]+ MB predicted, 1\.0 MB free", "recipes/plan.py"),
        ("disk", "w1", r"1 checkpoint of 2\.2 MB takes 2\.2 MB, 1\.0 MB free in .*/runs", "checkpoint.keep_last"),
        ("/dev/shm", "w1", r"/dev/shm has 524\.3 kB free, 1\.0 MB are wanted", "remount"),
        ("open files", "w1", "a process may open 72 files, rank 0 of 4 opens about 96", "nofile"),
        ("run folder", "w1", "/runs here lacks what w0 wrote: another disk", "mount the shared disk"),
        ("corpus folder", "w1", "/runs/corpus here lacks what w0 wrote", "data.cache_dir"),
        ("clock", "w1", r"7\.[3-7] s ahead of w0 \(the round trip leaves 0\.\d\d s\)", "chronyc"),
        ("network", "w0", f"MASTER_PORT={PORT} cannot be used: Address already in use", "unset it"),
    ],
)  # fmt: skip
def test_each_fault_is_told_with_its_host_and_its_remedy(broken, check, host, text, remedy):
    _, output, found, _ = broken
    cell = found[check][host]
    assert cell["ok"] is False and re.search(text, cell["text"]) and re.search(remedy, cell["remedy"]), cell
    assert f"{host}: {check}: {cell['text']}\n    {cell['remedy']}\n" in output


def test_what_is_well_beside_is_not_blamed_and_the_code_says_that_something_is_wrong(broken):
    code, output, found, folder = broken
    red = {(check, host) for check, cells in found.items() for host, cell in cells.items() if cell["ok"] is False}
    assert code == 1 and {check for check, host in red if host == "w0"} == {"network"}
    assert found["reachable"]["w1"]["ok"] and found["python"]["w1"]["ok"]
    assert "of 15 checks found something wrong, on w0, w1" in output
    assert not list(folder.rglob(".preflight-*"))


def test_a_host_that_is_down_is_red_and_the_others_are_checked_on(fresh, tmp_path):
    fresh[1].link("down")
    code, output, found = preflight(fresh, tmp_path, "--quick")
    assert code == 1 and "ssh does not reach it" in found["reachable"]["w1"]["text"]
    for check, cells in found.items():
        assert cells["w0"]["ok"], (check, cells)
        assert check == "reachable" or cells["w1"] == {"ok": None, "text": "not checked"}
    assert "preflight: 1 of 15 checks found something wrong, on w1" in output


def test_one_host_under_two_names_is_one_red_cell(hosts, tmp_path):
    (tmp_path / "hostfile").write_text("w0 slots=1\n10.77.0.1 slots=1\n")
    code, output, found = preflight(hosts, tmp_path, "--quick")
    red = {(check, host) for check, cells in found.items() for host, cell in cells.items() if cell["ok"] is False}
    assert code == 1 and red == {("reachable", "10.77.0.1")}, output
    assert "10.77.0.1: reachable: it is w0 under another name\n    give all its slots in one line\n" in output


SMI = """#!/bin/sh
case $1 in
--query-gpu=*) cat <<END
0, GPU-a, NVIDIA H100 80GB HBM3, 81559, 4, 31, 0, No, No, 0x0000000000000001, 0x0000000000000001
END
;;
esac
"""


def test_fewer_gpus_than_slots_and_a_sick_one_are_told(fresh, tmp_path):
    """Without a GPU: nvidia-smi is one that answers for one, in the words of the true one."""
    sick = SMI.replace("31, 0, No, No, 0x0000000000000001", "91, 3, Yes, No, 0x0000000000000040")
    two = SMI.replace("\nEND", "\n1, GPU-b, NVIDIA H100 80GB HBM3, 81559, 4, 30, 0, No, No, 0x0, 0x0\nEND", 1)
    for host, text in ((fresh[0], two), (fresh[1], sick)):
        host.run(["mount", "-t", "tmpfs", "tmpfs", "/usr/local/sbin"])
        (tmp_path / host.name).write_text(text)
        host.run(["install", "-m", "755", str(tmp_path / host.name), "/usr/local/sbin/nvidia-smi"])
    fresh.hostfile(tmp_path / "hostfile", slots=2)
    code, _, found = preflight(fresh, tmp_path, "--quick", DS_ACCELERATOR="cuda")
    assert code == 1
    assert found["devices"]["w0"] == {"ok": True, "text": "ok: NVIDIA H100 80GB HBM3"}
    assert found["devices"]["w1"]["text"] == "slot 1 but 1 GPU"
    assert found["gpu health"]["w1"]["text"] == (
        "GPU 0 has 3 uncorrected ECC errors; GPU 0 has remapped rows pending; "
        "GPU 0 is throttled: hardware thermal slowdown; and 1 more"
    )
    assert found["gpu health"]["w0"]["ok"] and found["memory"]["w0"]["ok"]


@pytest.mark.slow
def test_multinode_does_not_start_where_its_preflight_is_red(hosts, tmp_path):
    (tmp_path / "hostfile").write_text("w0 slots=1\nw7 slots=1\n")
    command = [MULTINODE, "hostfile", "--preflight", SHOWS, "parallel=tp1"]
    code, output = finish(hosts[0], command, tmp_path, environ(hosts))
    assert code == 2 and "w7: reachable: ssh does not reach it" in output and "deepspeed" not in output.lower()
    assert not list(tmp_path.glob("rank-*"))


@pytest.mark.slow
def test_multinode_starts_where_its_preflight_finds_nothing(hosts, tmp_path):
    (tmp_path / "hostfile").write_text("w0 slots=1\n")  # alone: no rate is another's
    command = [MULTINODE, "hostfile", "--preflight", SHOWS, "parallel=tp1"]
    code, output = finish(hosts[0], command, tmp_path, environ(hosts))
    assert code == 0, output
    assert "preflight: 17 checks on 1 host, nothing is wrong" in output and (tmp_path / "rank-0.json").exists()


@pytest.fixture
def halved() -> Iterator[Callable[[Host], None]]:
    """halved(host): its ranks of the probe are stopped half of the time, as where a hypervisor gives it no more."""
    over = threading.Event()
    threads = []

    def halve(host: Host) -> None:
        while not over.wait(0.05):
            processes = host.processes()
            for action in ("suspend", "resume"):
                for one in processes:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        if "engine.probe_hosts" in one.cmdline():
                            getattr(one, action)()
                over.wait(0.05 if action == "suspend" else 0)

    def start(host: Host) -> None:
        threads.append(threading.Thread(target=halve, args=(host,)))
        threads[-1].start()

    yield start
    over.set()
    for thread in threads:
        thread.join()


@pytest.mark.slow
def test_a_slow_host_is_named_among_three_and_so_is_one_with_a_slow_link(allowed, tmp_path, halved):
    """Links of 200 Mbit/s to each, but one of 20; all on one core, of which one gets half the time of the others."""
    with Hosts(3, tmp_path / "hosts") as three:
        for host, rate in zip(three, (200_000, 200_000, 20_000), strict=True):
            host.rate(rate)
            host.run(["taskset", "--pid", "--cpu-list", "0", "1"])
        halved(three[1])
        code, output, found = preflight(three, tmp_path)
    assert code == 1, output
    red = {(check, host) for check, cells in found.items() for host, cell in cells.items() if cell["ok"] is False}
    assert red == {("matrix rate", "w1"), ("link rate", "w2")}, output
    assert re.search(r"FLOP/s on slot 0, the others' median is", found["matrix rate"]["w1"]["text"])
    expected = r"receives at most 2\.\d+ MB/s, the others' median is 2\d\.?\d* MB/s"
    assert re.fullmatch(expected, found["link rate"]["w2"]["text"]), found["link rate"]
