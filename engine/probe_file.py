"""The cluster file that a probe writes: where it goes, and its text."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import torch

from conf.knobs import CONF
from conf.schema import ProbeConfig
from engine.probe import Findings, FittedLink


def target(chosen: ProbeConfig) -> Path | None:
    """Where to write; None where nothing is asked for, or on another rank than 0. ValueError where that cannot be."""
    if chosen.write is None or os.environ.get("RANK", "0") != "0":
        return None
    given = f"probe.write={chosen.write}"
    path = Path(chosen.write).expanduser() if "/" in chosen.write else CONF / "cluster" / chosen.write
    if path.suffix not in (".yaml", ".yml"):
        path = path.with_name(f"{path.name}.yaml")
    if not re.fullmatch(r"\w[\w.-]*", path.stem):
        raise ValueError(f"{given} is not the name of a cluster; use letters, digits and . _ -")
    if not path.parent.is_dir():
        raise ValueError(f"{given}: there is no folder {path.parent}; make it or choose another")
    if path.exists() and not chosen.overwrite:
        raise ValueError(f"{given}: {path} is there already; choose another name or set probe.overwrite=true")
    return path


def as_yaml(found: Findings, *, name: str) -> str:
    """The text of conf/cluster/NAME.yaml."""
    threads = "" if found.threads is None else f", {found.threads} threads a rank"
    day = time.strftime("%Y-%m-%d")
    lines = [
        f"# {found.device_name}: measured by recipes/probe.py on {day}, {len(found.hosts)} rank(s) on {found.nodes} "
        f"host(s) at once{threads}.",
        f"# torch {torch.__version__}; rates and collectives in {found.dtype}. peak_flops, if any: the data sheet's.",
        f"name: {name}",
        f"nodes: {found.nodes}",
        f"device: {found.device_kind}",
        f"devices_per_node: {found.devices_per_node}",
        f"memory_per_device: {_number(found.memory_per_device)}",
    ]
    if found.peak_flops is not None:
        lines.append(f"peak_flops: {_number(found.peak_flops)}")
    lines += _link("intra_node", found.intra_node, "one rank a host ran")
    lines += _link("inter_node", found.inter_node, "all ranks ran on one host")
    lines += _link("host", found.host, "the device is the host")
    lines += [
        "rates:",
        f"  matrix_flops: {_number(found.matrix.matrix_flops)}",
        f"  operand_bandwidth: {_number(found.matrix.operand_bandwidth)}",
        f"  attention_flops: {_number(found.attention_flops)}",
        f"  memory_bandwidth: {_number(found.memory_bandwidth)}",
        f"  kernel_s: {_number(found.matrix.kernel_s)}",
        *([] if found.overlap is None else [f"  overlap: {found.overlap.share:.3f}"]),
        f"  dtype: {found.dtype}",
        f"  source: recipes/probe.py on {day}, {found.dtype}",
    ]
    return "\n".join(lines) + "\n"


def _link(knob: str, fitted: FittedLink, absent: str) -> list[str]:
    if fitted.link is None:
        return [f"# {knob}: not measured, {absent}"]
    link = fitted.link
    numbers = f"bandwidth: {_number(link.bandwidth)}, latency_s: {_number(link.latency_s)}"
    return [f"{knob}: {{name: {link.name}, {numbers}}}"]


def _number(value: float) -> str:
    return f"{value:.4e}"
