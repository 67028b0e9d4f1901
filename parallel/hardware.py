"""What data sheets and the operating system say of the devices; torch is not needed to ask.

Not here: the device a rank computes on (`engine.device`) and what it is measured to do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Dense FLOP/s of one device, data sheets (no sparsity): fp32 without TF32, 16-bit on tensor cores.
PEAK_FLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    ("V100", {"fp32": 15.7e12, "fp16": 125e12}),
    ("T4", {"fp32": 8.1e12, "fp16": 65e12}),
    ("A10G", {"fp32": 31.5e12, "bf16": 70e12, "fp16": 70e12}),
    ("A100", {"fp32": 19.5e12, "bf16": 312e12, "fp16": 312e12}),
    ("A800", {"fp32": 19.5e12, "bf16": 312e12, "fp16": 312e12}),
    ("L4", {"fp32": 30.3e12, "bf16": 121e12, "fp16": 121e12}),
    ("L40S", {"fp32": 91.6e12, "bf16": 362e12, "fp16": 362e12}),
    ("H100 PCIe", {"fp32": 51e12, "bf16": 756e12, "fp16": 756e12}),
    ("H100 NVL", {"fp32": 60e12, "bf16": 835e12, "fp16": 835e12}),
    ("H100", {"fp32": 67e12, "bf16": 989e12, "fp16": 989e12}),
    ("H800", {"fp32": 67e12, "bf16": 989e12, "fp16": 989e12}),
    ("GH200", {"fp32": 67e12, "bf16": 989e12, "fp16": 989e12}),
    ("H200", {"fp32": 67e12, "bf16": 989e12, "fp16": 989e12}),
    ("B200", {"fp32": 75e12, "bf16": 2250e12, "fp16": 2250e12}),
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Data-sheet FLOP/s of a device by the name its driver gives, for fp32, bf16 or fp16; None where unknown.

    The longest matching entry wins ("H100 PCIe" over "H100"), and matches whole words: "A10" is not "A100".
    """
    words = device_name.replace("-", " ").lower().split()
    found: dict[str, float] = {}
    longest = 0
    for name, peaks in PEAK_FLOPS:
        wanted = name.lower().split()
        if all(word in words for word in wanted) and len(wanted) > longest:
            found, longest = peaks, len(wanted)
    return found.get(dtype)


def device_kind(environ: Mapping[str, str] = os.environ, *, devices: Path = Path("/dev")) -> str:
    """ "cuda" or "cpu": what a rank started here will compute on, without importing torch."""
    chosen = environ.get("DS_ACCELERATOR")
    if chosen is not None:
        return "cuda" if chosen == "cuda" else "cpu"
    if environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return "cpu"
    if not (any(devices.glob("nvidia[0-9]*")) or (devices / "dxg").exists()):
        return "cpu"
    try:
        return "cpu" if version("torch").endswith("+cpu") else "cuda"
    except PackageNotFoundError:
        return "cpu"


def device_count(environ: Mapping[str, str] = os.environ, *, devices: Path = Path("/dev")) -> int:
    """GPUs that ranks started here may use: those of CUDA_VISIBLE_DEVICES, or all; 0 where they use the CPU."""
    if device_kind(environ, devices=devices) == "cpu":
        return 0
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    return max(1, len(list(devices.glob("nvidia[0-9]*"))))
