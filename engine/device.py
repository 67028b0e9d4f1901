"""The one place that knows what kind of device a rank runs on: CPU with gloo or CUDA with NCCL.

Everything else asks this file for the device, the backend, a clock and the memory in use.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import time
from dataclasses import dataclass

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


@dataclass(frozen=True)
class Device:
    """kind: "cpu" or "cuda"; torch_device: where tensors live; backend: of torch.distributed."""

    kind: str
    torch_device: torch.device
    backend: str

    @property
    def name(self) -> str:
        """The product name of the hardware, as its driver or kernel gives it."""
        if self.kind == "cuda":
            return torch.cuda.get_device_name(self.torch_device)
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
        return "CPU"

    def synchronize(self) -> None:
        """Wait for queued kernels, so that a clock read afterwards is true."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.torch_device)

    def now(self) -> float:
        """Seconds on a monotonic clock, after all queued work."""
        self.synchronize()
        return time.perf_counter()

    def memory_bytes(self) -> int:
        """Bytes in use now: allocated tensors on CUDA, resident set of the process on CPU."""
        if self.kind == "cuda":
            return torch.cuda.memory_allocated(self.torch_device)
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()

    def memory_per_rank(self) -> int:
        """Bytes that a rank may use: its GPU's, or its share of this machine's."""
        if self.kind == "cuda":
            return torch.cuda.get_device_properties(self.torch_device).total_memory
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks

    @property
    def threads(self) -> int | None:
        """Threads that a rank computes with; None on an accelerator."""
        return None if self.kind == "cuda" else torch.get_num_threads()

    def peak_memory_bytes(self) -> int:
        """Largest memory_bytes() so far in this process."""
        if self.kind == "cuda":
            return torch.cuda.max_memory_allocated(self.torch_device)
        # The kernel counts its peak in batches of pages, so it can lag behind what is in use.
        return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, self.memory_bytes())

    def release_freed_memory(self) -> None:
        """Hand back what freed tensors left, so that memory measured from now on is that of what follows."""
        if self.kind == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.torch_device)
        elif platform.libc_ver()[0] == "glibc":
            ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory instead of handing it back, for CPU training.

    Each micro-batch frees hundreds of MB of activations and needs as much again; without this, every page of them is
    faulted in and zeroed anew. Changes nothing under another C library.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def this_device() -> Device:
    """The device of this rank, by LOCAL_RANK (0 without a launcher)."""
    if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR", "cuda") == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return Device(kind="cuda", torch_device=device, backend="nccl")
    return Device(kind="cpu", torch_device=torch.device("cpu"), backend="gloo")


def matmul_rate(device: Device, dtype: torch.dtype, *, seconds: float = 0.4, size: int | None = None) -> float:
    """FLOP/s that a square matrix product reaches on this device now, with this process's threads (median of tries)."""
    n = size or (8192 if device.kind == "cuda" else 1024)
    a = torch.randn(n, n, device=device.torch_device).to(dtype)
    b = torch.randn(n, n, device=device.torch_device).to(dtype)
    a @ b
    rates: list[float] = []
    end = device.now() + seconds
    while not rates or device.now() < end:
        start = device.now()
        a @ b
        rates.append(2 * n**3 / (device.now() - start))
    return sorted(rates)[len(rates) // 2]
