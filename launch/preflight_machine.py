"""What each host must have for the run: devices that are well, memory, disk, /dev/shm, open files -> a cell a host.

Pure: host -> what check_host.py answered. Needs are predicted (launch/needs.py). Texts of cells that are well hold the
least of all hosts, so that they read the same and join.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launch.preflight_checks import Answers, norm, some
from launch.preflight_table import Cell, good, wrong
from telemetry.tables import size

Slots = Mapping[str, Sequence[int]]

# NVIDIA's containers ask for --shm-size=1g, as NCCL's buffers between the GPUs of a host lie in /dev/shm and docker
# gives 64 MB. gloo keeps nothing there; the environment's file takes kilobytes.
SHM_BYTES = {"cuda": 1 << 30, "cpu": 1 << 20}
# Rank 0 of 2, 4 and 8 ranks (gloo, tp and pp up to 2) held 68, 79 and 107: connections of the groups and the store.
FILES, FILES_A_RANK = 64, 8
HOTTEST_C = 85  # an idle GPU; data-center ones slow down from about 90
BUSY_BYTES = 1 << 30  # in use before the run begins; the driver itself keeps some hundred MB
# nvml.h, nvmlClocksEventReasons: those that say that something is wrong with power or cooling.
THROTTLED = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


def devices(facts: Answers, views: Answers, slots: Slots) -> dict[str, Cell]:
    """As many as the hostfile says, of one kind and model. Without nvidia-smi a model is not known."""
    kinds = {host: view["device"] for host, view in views.items()}
    usual = norm(kinds.values())
    models = {host: _models(facts[host], slots[host]) for host, kind in kinds.items() if kind == "cuda"}
    model = norm(name for name in models.values() if name)
    cells = {}
    for host in views:
        if kinds[host] != usual:
            text = f"ranks here would compute on {kinds[host]}, elsewhere on {usual}"
            cells[host] = wrong(text, "look for the driver (nvidia-smi), torch's build and DS_ACCELERATOR there")
        elif kinds[host] == "cpu":
            cells[host] = _cores(facts[host]["cores"], slots[host])
        else:
            cells[host] = _gpus(facts[host], views[host], slots[host], models[host], model)
    return cells


def _cores(cores: int, slots: Sequence[int]) -> Cell:
    if cores >= len(slots):
        return good("cpu, a core or more a slot")
    return wrong(
        f"{len(slots)} slots but {cores} core{'s' * (cores > 1)}", "give it fewer slots in the hostfile (or -i)"
    )


def _models(facts: Mapping[str, Any], slots: Sequence[int]) -> str:
    names = {gpu["name"] for gpu in facts["gpus"] or () if gpu["index"] in slots}
    return " and ".join(sorted(names))


def _gpus(
    facts: Mapping[str, Any], view: Mapping[str, Any], slots: Sequence[int], mine: str, usual: str | None
) -> Cell:
    if facts["gpu_problem"] is not None:
        return wrong(
            facts["gpu_problem"], "look at the driver there (dmesg | grep NVRM); reboot it, or leave it out (-e)"
        )
    count = view["devices"] if facts["gpus"] is None else len(facts["gpus"])
    if max(slots) >= count:
        text = f"slot {max(slots)} but {count} GPU{'s' * (count != 1)}"
        return wrong(
            text, "give it the slots that it has in the hostfile (or -i); look for a GPU that fell off the bus"
        )
    if mine and mine != usual:
        return wrong(f"{mine} here, {usual} on most", "leave this host out (-e): the slowest device sets the pace")
    return good(mine or "cuda")


def health(facts: Answers, slots: Slots) -> dict[str, Cell]:
    """Of the GPUs that are slots; hosts without nvidia-smi are not told of."""
    cells = {}
    for host, one in facts.items():
        if one["gpus"]:
            found = [fault for gpu in one["gpus"] if gpu["index"] in slots[host] for fault in _faults(gpu)]
            remedy = "; ".join(dict.fromkeys(remedy for _, remedy in found))
            cells[host] = wrong(some([text for text, _ in found]), remedy) if found else good()
    return cells


def _faults(gpu: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(what is wrong, what to do)"""
    name, found = f"GPU {gpu['index']}", []
    if gpu["ecc"]:
        text = f"{name} has {gpu['ecc']} uncorrected ECC error{'s' * (gpu['ecc'] > 1)}"
        found.append((text, "reset it (nvidia-smi -r) or reboot; leave the host out (-e) if they come back"))
    if gpu["failure"]:
        found.append((f"{name} failed to remap rows of its memory", "have it replaced; leave the host out (-e)"))
    elif gpu["pending"]:
        found.append((f"{name} has remapped rows pending", "reset it (nvidia-smi -r) or reboot"))
    reasons = [text for bit, text in THROTTLED.items() if (gpu["reasons"] or 0) & bit]
    if reasons:
        found.append((f"{name} is throttled: {', '.join(reasons)}", "look at its cooling and power; leave it out (-e)"))
    if (gpu["temperature"] or 0) >= HOTTEST_C:
        found.append((f"{name} is at {gpu['temperature']} C", "look at its cooling and who uses it"))
    if (gpu["used"] or 0) >= BUSY_BYTES:
        who = ", ".join(gpu["users"]) or "processes that are not seen from here"
        found.append((f"{name}: {size(gpu['used'])} are in use by {who}", "end them, or leave the slot out (-e)"))
    return found


def memory(facts: Answers, views: Answers, slots: Slots) -> dict[str, Cell]:
    """Bytes that the plan is predicted to take on each device, against what is free there."""
    remedy = (
        "end what else runs there, use more ranks, or ask recipes/plan.py which plan fits (cluster.memory_per_device)"
    )
    kept: dict[str, tuple[int, int]] = {}
    cells: dict[str, Cell] = {}
    for host, view in views.items():
        wanted = _wanted(facts[host], view, slots[host])
        for where, need, free in wanted:
            if need > free:
                cells.setdefault(host, wrong(f"{where}: {size(need)} predicted, {size(free)} free", remedy))
        if wanted and host not in cells:
            kept[host] = max(need for _, need, _ in wanted), min(free for _, _, free in wanted)
    if kept:
        most, least = max(need for need, _ in kept.values()), min(free for _, free in kept.values())
        cells |= dict.fromkeys(kept, good(f"at most {size(most)} predicted, at least {size(least)} free"))
    return cells


def _wanted(facts: Mapping[str, Any], view: Mapping[str, Any], slots: Sequence[int]) -> list[tuple[str, int, int]]:
    """(where, bytes predicted, bytes free) of the host's memory and of each GPU that is a slot."""
    needs = view["needs"]
    if view["device"] == "cpu":
        return [("memory", sum(needs["rank_bytes"]) + needs["host_bytes"], facts["memory"])]
    gpus = {gpu["index"]: gpu for gpu in facts["gpus"] or () if gpu["total"] is not None}
    found = [
        (f"GPU {slot}", need, gpus[slot]["total"] - (gpus[slot]["used"] or 0))
        for slot, need in zip(slots, needs["rank_bytes"], strict=True)
        if slot in gpus
    ]
    offloaded = [("host memory", needs["host_bytes"], facts["memory"])] if needs["host_bytes"] else []
    return found + offloaded


def disk(views: Answers) -> dict[str, Cell]:
    """Room in the run's folder for the checkpoints that are kept and the one that is being written."""

    def told(view: Mapping[str, Any]) -> tuple[int, str]:
        count, each = view["needs"]["checkpoints"], view["needs"]["checkpoint_bytes"]
        plural = "s of {} take" if count != 1 else " of {} takes"
        return count * each, f"{count} checkpoint{plural.format(size(each))} {size(count * each)}"

    return enough(
        {host: view["free"] for host, view in views.items()},
        {host: told(view)[0] for host, view in views.items()},
        short=lambda host, free: f"{told(views[host])[1]}, {size(free)} free in {views[host]['folders']['run folder']}",
        fine=lambda host, least: f"{told(views[host])[1]}, at least {size(least)} free",
        remedy="make room, lower checkpoint.keep_last, or give another run.dir",
    )


def shared_memory(facts: Answers, views: Answers) -> dict[str, Cell]:
    need = {host: SHM_BYTES[view["device"]] for host, view in views.items()}
    return enough(
        {host: facts[host]["shm"] for host in views},
        need,
        short=lambda host, free: f"/dev/shm has {size(free)} free, {size(need[host])} are wanted",
        fine=lambda host, least: f"at least {size(least)} free",
        remedy="remount it larger (mount -o remount,size=8G /dev/shm); in a container --shm-size or --ipc=host",
    )


def open_files(facts: Answers, *, world_size: int) -> dict[str, Cell]:
    need = FILES + FILES_A_RANK * world_size
    limits = {host: float("inf") if one["files"] < 0 else one["files"] for host, one in facts.items()}
    return enough(
        limits,
        dict.fromkeys(facts, need),
        short=lambda host, limit: f"a process may open {limit} files, rank 0 of {world_size} opens about {need}",
        fine=lambda host, least: f"{need} at most on a rank",
        remedy="raise it for ssh's sessions there: nofile in /etc/security/limits.conf, or LimitNOFILE of sshd's unit",
    )


def enough(
    have: Mapping[str, float],
    need: Mapping[str, float],
    *,
    short: Callable[[str, Any], str],
    fine: Callable[[str, Any], str],
    remedy: str,
) -> dict[str, Cell]:
    least = min((have[host] for host in have if have[host] >= need[host]), default=0)
    return {
        host: good(fine(host, least)) if have[host] >= need[host] else wrong(short(host, have[host]), remedy)
        for host in have
    }
