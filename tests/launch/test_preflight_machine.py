"""What a host must have, at its boundary: devices, memory, disk, /dev/shm, open files."""

from __future__ import annotations

from typing import Any

import pytest

from launch import preflight_machine as machine
from tests.launch.test_preflight_checks import red

GB = 10**9
GPU: dict[str, Any] = {
    "index": 0, "name": "H100", "total": 80 * GB, "used": 0, "temperature": 84, "ecc": 0, "pending": False,
    "failure": False, "reasons": 0x05, "users": [],
}  # fmt: skip


def facts(**changes: Any) -> dict[str, Any]:
    return {
        "cores": 2, "memory": 10 * GB, "shm": 8 << 30, "files": 1024, "gpus": None, "gpu_problem": None,
    } | changes  # fmt: skip


def view(device: str = "cpu", **changes: Any) -> dict[str, Any]:
    needs = {"rank_bytes": [4 * GB, 4 * GB], "host_bytes": 0, "checkpoint_bytes": 12 * GB, "checkpoints": 4}
    about = {"device": device, "devices": 2, "free": 48 * GB, "folders": {"run folder": "/shared/runs"}}
    return about | {"needs": needs | changes.pop("needs", {})} | changes


def gpus(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [GPU | {"index": index} | change for index, change in enumerate(changes)]


SLOTS = {"w0": [0, 1], "w1": [0, 1]}


def test_a_cpu_host_has_a_core_a_slot():
    two, one = facts(cores=2), facts(cores=1)
    cells = machine.devices({"w0": two, "w1": one}, {"w0": view(), "w1": view()}, SLOTS)
    assert red(cells) == {"w1": "2 slots but 1 core"}


def test_gpus_are_as_many_as_slots_by_number():
    both = {"w0": facts(gpus=gpus({}, {})), "w1": facts(gpus=gpus({}))}
    views = {host: view("cuda") for host in both}
    assert red(machine.devices(both, views, SLOTS)) == {"w1": "slot 1 but 1 GPU"}
    assert red(machine.devices(both, views, {"w0": [1], "w1": [0]})) == {}  # -i w0:1@w1:0
    none = {"w0": facts(gpus=[], gpu_problem="nvidia-smi fails: no driver"), "w1": facts()}
    told = red(machine.devices(none, {"w0": view("cuda"), "w1": view("cuda", devices=0)}, SLOTS))
    assert told == {"w0": "nvidia-smi fails: no driver", "w1": "slot 1 but 0 GPUs"}


def test_another_model_and_another_kind_of_device_are_told():
    found = {name: facts(gpus=gpus({"name": model}, {"name": model})) for name, model in
             (("w0", "H100"), ("w1", "A100"), ("w2", "H100"))}  # fmt: skip
    slots = {host: [0, 1] for host in found}
    assert red(machine.devices(found, dict.fromkeys(found, view("cuda")), slots)) == {"w1": "A100 here, H100 on most"}
    views = {"w0": view("cuda"), "w1": view("cpu"), "w2": view("cuda")}
    told = red(machine.devices(found, views, slots))
    assert told == {"w1": "ranks here would compute on cpu, elsewhere on cuda"}
    assert machine.devices({"w0": facts()}, {"w0": view("cuda")}, SLOTS)["w0"].text == "ok: cuda"  # no nvidia-smi


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, None),
        ({"ecc": 1}, "GPU 0 has 1 uncorrected ECC error"),
        ({"ecc": None, "pending": None, "failure": None, "reasons": None, "temperature": None, "used": None}, None),
        ({"pending": True}, "GPU 0 has remapped rows pending"),
        ({"pending": True, "failure": True}, "GPU 0 failed to remap rows of its memory"),
        ({"reasons": 0x05}, None),  # idle, and a power cap, which every GPU under load has
        ({"reasons": 0x60}, "GPU 0 is throttled: software thermal slowdown, hardware thermal slowdown"),
        ({"temperature": 85}, "GPU 0 is at 85 C"),
        ({"used": (1 << 30) - 1}, None),
        ({"used": 1 << 30, "users": ["python (process 7)"]}, "GPU 0: 1.1 GB are in use by python (process 7)"),
        ({"used": 1 << 30}, "GPU 0: 1.1 GB are in use by processes that are not seen from here"),
    ],
)
def test_a_gpu_is_well_or_it_is_told_why_not(change, text):
    cells = machine.health({"w0": facts(gpus=gpus(change))}, {"w0": [0]})
    assert red(cells) == ({} if text is None else {"w0": text})
    assert red(machine.health({"w0": facts(gpus=gpus({}, change))}, {"w0": [0]})) == {}  # not one of the slots


def test_the_ranks_of_a_cpu_host_fit_its_memory_together():
    needs = {"rank_bytes": [4 * GB, 5 * GB], "host_bytes": 1 * GB}
    views = {"w0": view(needs=needs)}
    assert red(machine.memory({"w0": facts(memory=10 * GB)}, views, SLOTS)) == {}
    told = red(machine.memory({"w0": facts(memory=10 * GB - 1)}, views, SLOTS))
    assert told == {"w0": "memory: 10.0 GB predicted, 10.0 GB free"}


def test_each_rank_fits_what_is_free_on_its_gpu_and_offloaded_states_the_host():
    views = {"w0": view("cuda", needs={"rank_bytes": [70 * GB, 70 * GB]})}
    busy = {"w0": facts(gpus=gpus({"used": 10 * GB}, {"used": 10 * GB + 1}))}
    assert red(machine.memory(busy, views, SLOTS)) == {"w0": "GPU 1: 70.0 GB predicted, 70.0 GB free"}
    views["w0"]["needs"]["rank_bytes"][1] -= 1
    assert machine.memory(busy, views, SLOTS)["w0"].text == "ok: at most 70.0 GB predicted, at least 70.0 GB free"
    views["w0"]["needs"]["host_bytes"] = 11 * GB
    assert red(machine.memory(busy, views, SLOTS)) == {"w0": "host memory: 11.0 GB predicted, 10.0 GB free"}


def test_cells_of_hosts_with_other_numbers_read_the_same_where_all_fit():
    both = {"w0": facts(memory=20 * GB), "w1": facts(memory=30 * GB)}
    cells = machine.memory(both, {host: view() for host in both}, SLOTS)
    assert cells["w0"] == cells["w1"] and cells["w0"].text == "ok: at most 8.0 GB predicted, at least 20.0 GB free"


def test_the_disk_holds_the_checkpoints_that_are_kept_and_one_more():
    assert machine.disk({"w0": view()})["w0"].text == "ok: 4 checkpoints of 12.0 GB take 48.0 GB, at least 48.0 GB free"
    told = red(machine.disk({"w0": view(), "w1": view(free=48 * GB - 1)}))
    assert told == {"w1": "4 checkpoints of 12.0 GB take 48.0 GB, 48.0 GB free in /shared/runs"}


def test_shared_memory_is_wanted_by_gpus_and_hardly_by_cpus():
    small = {"w0": facts(shm=64 << 20)}  # docker's default
    assert red(machine.shared_memory(small, {"w0": view("cpu")})) == {}
    assert red(machine.shared_memory(small, {"w0": view("cuda")})) == {
        "w0": "/dev/shm has 67.1 MB free, 1.1 GB are wanted"
    }
    assert red(machine.shared_memory({"w0": facts(shm=1 << 30)}, {"w0": view("cuda")})) == {}


def test_open_files_bite_from_a_number_of_ranks_on():
    assert red(machine.open_files({"w0": facts(files=1024)}, world_size=120)) == {}
    assert red(machine.open_files({"w0": facts(files=1024)}, world_size=121)) == {
        "w0": "a process may open 1024 files, rank 0 of 121 opens about 1032"
    }
    assert red(machine.open_files({"w0": facts(files=-1)}, world_size=10**6)) == {}  # no limit
