"""launch/preflight.sh with hosts that are played: what is asked of whom, what is red, and what is refused before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from conf.hostfile import Slots
from conf.load import ConfigError
from conf.schema import Config
from launch import allocation, check_host, environment, multinode, preflight
from launch.preflight_asking import Preflight, clock_of, first_problems, ranks_of
from launch.preflight_table import Row
from launch.remote import Answer
from tests.engine.launched import wait_for

ROOT = Path(__file__).resolve().parents[2]
OVERRIDES = ("model=llama_tiny", "parallel=tp1", "resume=auto")
HOSTS = {"w0": [0, 1], "w1": [0, 1]}
CLOCK = ["bash", "-c", "echo welcome; while read -r _; do echo time $(date +%s.%N); done"]


@cache
def told(verb: str, ranks: str) -> dict[str, Any]:
    """What this machine answers as a host with these ranks."""
    order = {
        "folder": str(ROOT), "recipe": str(ROOT / "recipes" / "pretrain.py"), "overrides": OVERRIDES, "world_size": 4,
        "ranks": json.loads(ranks),
    }  # fmt: skip
    return check_host.answer(verb, order)


class Played:
    """Hosts that do their part in this process, but for their network and their rates; `says` changes an answer."""

    def __init__(self, **says: Any) -> None:
        self.says, self.asked = says, list[tuple[str, tuple[str, ...]]]()

    def command(self, host: str, verb: str) -> list[str]:
        return CLOCK

    def addresses(self, hosts: Sequence[str]) -> dict[str, str]:
        return {host: host for host in hosts}

    def call(self, verb: str, orders: Mapping[str, Mapping[str, Any]], *, timeout_s: float = 60.0) -> list[Answer]:
        self.asked.append((verb, tuple(orders)))
        return [self._answer(host, verb, dict(order)) for host, order in orders.items()]

    def _answer(self, host: str, verb: str, order: dict[str, Any]) -> Answer:
        said = self.says.get(f"{host}_{verb}", {})
        if isinstance(said, str):
            return Answer(host, {}, said)
        addresses = {"eth0": ["10.0.0.1"]}
        folders = {name: f"{order.get('folder')}/{name}" for name in ("run folder", "corpus folder")}
        played = {
            "facts": lambda: told("facts", "[0, 1]") | {"cores": 2, "machine": host},
            "view": lambda: told("view", json.dumps(order["ranks"])) | {"folders": folders},
            "look": lambda: {
                "address": "10.0.0.1", "interface": "eth0", "port": order["port"], "addresses": addresses
            },
            "meet": dict,
            "rates": lambda: {
                "found": {
                    "matrix": [1e9] * order["world_size"],
                    "links": [[0, 1, 1e9], [1, 0, 1e9]] if len(order["probe"]["hosts"]) == 2 else [],
                }
            },
        }  # fmt: skip
        values = played[verb]() if verb in played else check_host.answer(verb, order)
        return Answer(host, {**values, **said}, None)


@pytest.fixture
def found(tmp_path, monkeypatch):
    """found(Played(...)): the rows by name."""
    monkeypatch.chdir(tmp_path)
    for name in ("MASTER_ADDR", "MASTER_PORT", *environment.travelling(os.environ)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(check_host, "READ_S", 0.0)

    def run(played: Played, *, rates: bool = True, first: Slots = HOSTS) -> dict[str, Row]:
        request = multinode.Request(Path("hosts"), "", "", None, None, ROOT / "recipes" / "pretrain.py", OVERRIDES)
        rows = Preflight(request, HOSTS, first, played, dtype="fp32", rates=rates).rows()
        return {row.check: row for row in rows}

    return run


def test_every_host_is_asked_all_at_once_and_nothing_is_red_where_all_is_alike(found, tmp_path):
    played = Played()
    rows = found(played)
    assert {check: row.red for check, row in rows.items() if row.red} == {}
    assert all(hosts == ("w0", "w1") for _, hosts in played.asked)
    assert [verb for verb, _ in played.asked] == [
        "facts", "view", "write", "read", "clear", "look", "meet", "rates"
    ]  # fmt: skip
    assert not list(tmp_path.rglob(".preflight-*"))


def test_quick_asks_for_no_rates(found):
    played = Played()
    rows = found(played, rates=False)
    assert "rates" not in dict(played.asked) and "matrix rate" not in rows and "link rate" not in rows


def test_a_lost_host_is_red_once_and_not_asked_again(found):
    played = Played(w1_facts="ssh does not reach it: no route to host")
    rows = found(played)
    assert {check: row.red for check, row in rows.items() if row.red} == {"reachable": ["w1"]}
    assert rows["reachable"].cells["w1"].remedy == "ssh w1 true must work from here"
    assert {hosts for verb, hosts in played.asked if verb not in ("facts", "rates")} == {("w0",)}
    assert rows["network"].cells["w1"].ok is None and rows["network"].cells["w0"].ok


def test_one_host_under_two_names_is_red_once_and_what_it_has_is_told_once(found):
    played = Played(w1_facts={"machine": "w0"})
    rows = found(played)
    assert {check: row.red for check, row in rows.items() if row.red} == {"reachable": ["w1"]}
    cell = rows["reachable"].cells["w1"]
    assert (cell.text, cell.remedy) == ("it is w0 under another name", "give all its slots in one line")
    assert all(row.cells["w1"].ok is None for check, row in rows.items() if check != "reachable")
    assert played.asked[1:] == [(verb, ("w0",)) for verb, _ in played.asked[1:]]


def test_where_no_host_answers_there_is_nothing_to_compare(found):
    assert list(found(Played(w0_facts="gone", w1_facts="gone"))) == ["reachable"]


def test_without_the_first_host_nobody_can_meet_and_that_is_no_fault_of_the_others(found):
    rows = found(Played(w0_facts="ssh does not reach it: down"))
    assert rows["network"].cells["w1"].text == "not checked: w0, where rank 0 would listen, has no address and port"
    assert rows["matrix rate"].cells["w1"].ok is None and rows["config"].cells["w1"].ok


@pytest.mark.parametrize(
    ("says", "check", "host", "text"),
    [
        ({"w1_view": "model=x: no such; try y"}, "config", "w1", "model=x: no such"),
        ({"w1_write": {"problems": {"run folder": "Read-only"}}}, "run folder", "w1", "written here: Read-only"),
        ({"w1_write": "no answer within 60 s"}, "corpus folder", "w1", "written here: no answer within 60 s"),
        ({"w1_look": "it has no interface ib0; it has lo"}, "network", "w1", "it has no interface ib0"),
        ({"w1_meet": "it does not reach rank 0; open it"}, "network", "w1", "it does not reach rank 0"),
        ({"w0_rates": "a rank failed: NCCL"}, "matrix rate", "w0", "a rank failed: NCCL"),
        ({"w0_rates": {"found": {"matrix": [1e9, 1e9, 1e9, 7e8], "links": []}}}, "matrix rate", "w1", "0.7 GF"),
        ({"w0_rates": {"found": {"matrix": [1e9] * 4, "links": [[0, 1, 1e9], [1, 0, 5e8]]}}}, "link rate", "w1", "500"),
        ({"w1_facts": {"python": "PyPy 3"}}, "python", "w1", "PyPy 3 here, CPython"),
        ({"w1_facts": {"files": 64}}, "open files", "w1", "a process may open 64 files, rank 0 of 4 opens about 96"),
        ({"w1_view": {"free": 0}}, "disk", "w1", "0 B free in"),
        ({"w1_facts": {"memory": 1}}, "memory", "w1", "1 B free"),
        ({"w1_facts": {"shm": 1}}, "/dev/shm", "w1", "/dev/shm has 1 B free"),
        ({"w1_facts": {"cores": 1}}, "devices", "w1", "2 slots but 1 core"),
        ({"w1_view": {"commit": "0" * 40}}, "code", "w1", "commit 0000000000 here"),
        ({"w1_view": {"environ": {"NCCL_DEBUG": "x"}}}, "environment", "w1", "NCCL_DEBUG is set here"),
    ],
)
def test_an_answer_that_differs_is_red_in_its_row_and_in_no_other(found, says, check, host, text):
    rows = found(Played(**says))
    assert text in rows[check].cells[host].text and rows[check].cells[host].remedy
    beside = {"corpus folder", "run folder"} if check in ("corpus folder", "run folder") else {check}
    assert {name for name, row in rows.items() if row.red} <= beside


def test_an_address_that_is_not_the_first_hosts_is_told(found, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "10.9.9.9")
    cell = found(Played())["network"].cells["w0"]
    assert cell.text.startswith("MASTER_ADDR=10.9.9.9 is no address of w0") and "10.0.0.1" in cell.text


def test_of_ranks_that_fail_the_first_are_told_and_not_those_that_lose_them():
    def failed(host: str, after: float | None) -> Answer:
        return Answer(host, {} if after is None else {"after": after}, f"{host} failed")

    answers = [failed("a", 3.0), Answer("b", {}, None), failed("c", 2.4), failed("d", 2.0), failed("e", None)]
    assert first_problems(answers) == {"c": "c failed", "d": "d failed"}
    assert first_problems([failed("e", None)]) == {"e": "e failed"} and first_problems(answers[1:2]) == {}


def test_ranks_are_counted_in_the_order_of_the_hostfile():
    assert ranks_of({"b": [0, 1], "a": [3]}) == {"b": [0, 1], "a": [2]}


def test_a_clock_is_read_over_an_open_line_past_what_a_login_shell_prints():
    offset, error = clock_of(CLOCK) or (9.0, 9.0)
    assert abs(offset) <= error + 0.01 and 0 < error < 1
    ahead, error = clock_of(["bash", "-c", "while read -r _; do echo time $(date -d '+1 hour' +%s.%N); done"]) or (0, 0)
    assert ahead == pytest.approx(3600, abs=error + 0.01)
    assert clock_of(["false"]) is None


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """(code, stdout, stderr) of a dry run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DRY_RUN", "1")
    for name in ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "hosts").write_text("w0 slots=2\nw1 slots=2\n")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["preflight.py", *arguments])
        code = preflight.main()
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


RUN = ["recipes/pretrain.py", "parallel=tp2"]


def test_a_dry_run_prints_what_would_be_asked_and_asks_no_host(call):
    code, out, err = call("hosts", "-p", "2222", *RUN)
    assert (code, err) == (0, "")
    first, second = out.splitlines()
    assert first.startswith("4 ranks on w0, w1, each: ") and first.endswith("pretrain.py parallel=tp2 resume=auto")
    assert (
        second.startswith("ssh -p 2222 ") and " HOST '" in second and "check_host.py VERB' for facts, view, " in second
    )
    assert second.endswith(", rates")
    assert not call("--quick", "hosts", *RUN)[1].splitlines()[1].endswith(", rates")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["hosts"], "usage: launch/preflight.sh HOSTFILE|--slurm"),
        (["-z", "hosts", *RUN], "option -z not recognized"),
        (["none", *RUN], "none: No such file"),
        (["hosts", "recipes/pretrain.py", "train.lrr=1"], "did you mean train.lr?"),
        (["hosts", "recipes/pretrain.py", "train.lr=-1"], "train.lr=-1"),
        (["hosts", "-e", "w1:0", *RUN], "does not divide the 3 slots"),
        (["hosts", *RUN, "train.global_batch_size=3"], "train.global_batch_size=3"),
        (["hosts", "--json", "no/such.json", *RUN], "--json no/such.json: there is no folder"),
        (["--slurm", *RUN], "--slurm: this is no Slurm allocation"),
    ],
)
def test_what_cannot_be_ends_with_code_2_and_a_line(call, arguments, line):
    code, out, err = call(*arguments)
    assert code == 2 and out == "" and line in err and len(err.splitlines()) == 1


def test_inside_an_allocation_its_hosts_are_asked_through_srun(call, tmp_path, monkeypatch):
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "scontrol").write_text('#!/bin/sh\n[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"\n')
    (fake / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x2)")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    code, out, _ = call("--quick", "--slurm", "-i", "n2", *RUN)
    assert code == 0 and out.startswith("2 ranks on n2, each: ")
    assert out.splitlines()[1].startswith("srun --nodelist=HOST --nodes=1 --ntasks=1 --overlap ")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "1(x2)")
    assert allocation.as_hostfile(Config()) == "n1 slots=8\nn2 slots=8\n"
    monkeypatch.delenv("SLURM_GPUS_ON_NODE")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2")
    with pytest.raises(ConfigError, match=r"speaks of 1 hosts"):
        allocation.as_hostfile(Config())
    monkeypatch.delenv("SLURM_NTASKS")  # sbatch -N 2: the tasks are CPUs that nobody asked for
    assert allocation.as_hostfile(Config()) == "n1 slots=1\nn2 slots=1\n"


def test_srun_carries_an_order_there_and_the_answer_back(tmp_path, monkeypatch):
    (tmp_path / "srun").write_text('#!/bin/sh\necho "srun: step" >&2; echo "$1"; cat\n')
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    answers = allocation.Srun("check_host.py").call("facts", {"n1": {"a": "b c"}, "n2": {"a": 2}})
    assert answers == [Answer("n1", {"a": "b c"}, None), Answer("n2", {"a": 2}, None)]


@pytest.mark.parametrize(("of_preflight", "expected"), [(0, 0), (1, 2), (2, 2), (130, 130)])
def test_multinode_starts_only_where_its_preflight_found_nothing(tmp_path, monkeypatch, of_preflight, expected):
    """And gives it its own words, wherever the option stood."""
    given: list[list[str]] = []

    class Played:
        def __init__(self, command: list[str]):
            given.append(command[1:])

        def wait(self) -> int:
            return of_preflight

    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("w0 slots=2\n")
    started: list[Any] = []
    monkeypatch.setattr(multinode.subprocess, "Popen", Played)
    monkeypatch.setattr(multinode, "launch_run", lambda *request: started.append(request) or 0)
    monkeypatch.setattr("sys.argv", ["multinode.py", "-i", "w0", "-r", "1", "hosts", "--preflight", *RUN])
    assert multinode.main() == expected
    words = [str(tmp_path / "hosts"), "-i", "w0", str(ROOT / RUN[0]), *RUN[1:]]
    assert given == [words + ["resume=auto"] * ("resume=auto" not in words)] and len(started) == (of_preflight == 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_preflight_that_is_stopped_waits_for_what_it_asked_so_that_nothing_is_left(tmp_path, number):
    (tmp_path / "hosts").write_text("w0 slots=2\n")
    (tmp_path / "ssh").write_text("#!/bin/sh\ntouch asked; sleep 3; touch answered; exit 1\n")
    (tmp_path / "ssh").chmod(0o755)
    started = subprocess.Popen(
        [ROOT / "launch" / "multinode.sh", "hosts", "--preflight", *RUN], cwd=tmp_path, stdout=subprocess.DEVNULL,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(lambda: (tmp_path / "asked").exists(), seconds=60, what="a question")
    started.send_signal(number)
    _, said = started.communicate(timeout=60)
    assert started.returncode == 128 + number and (tmp_path / "answered").exists()
    assert "it ends when the hosts have answered" in said and "Traceback" not in said


def test_the_plan_is_for_the_hosts_that_are_used_and_spares_are_asked_with_the_ranks_of_one_of_them(found):
    played = Played()
    rows = found(played, first={"w0": HOSTS["w0"]})
    assert {check: row.red for check, row in rows.items() if row.red} == {}
    assert all(hosts == ("w0", "w1") for _, hosts in played.asked)


def test_json_is_what_the_table_says(call, found, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DRY_RUN", "0")
    monkeypatch.setattr(preflight, "Ssh", lambda *_: Played(w1_facts={"files": 64}))
    code, out, _ = call("hosts", "--quick", "--json", "found.json", "recipes/pretrain.py", "parallel=tp1")
    told = json.loads((tmp_path / "found.json").read_text())
    assert code == 1 and told["ok"] is False and told["hosts"] == ["w0", "w1"]
    assert told["checks"]["open files"]["w1"]["text"] in out and told["checks"]["open files"]["w0"]["ok"]
