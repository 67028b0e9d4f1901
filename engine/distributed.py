"""Opening and closing torch.distributed through DeepSpeed, with what both print and compile kept in hand.

Not here: which rank plays which part (parallel/groups.py).
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed

from engine.device import Device, keep_freed_memory


def free_port() -> int:
    """A TCP port on this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(device: Device, *, timeout_s: float) -> None:
    """Join the process group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT name (one rank without them).

    DeepSpeed would compile `deepspeed_shm_comm` here on CPU, minutes at first use. It serves only all-reduces over
    the whole world in inference, never a training collective, so it is switched off.
    """
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    if "MASTER_PORT" not in os.environ and not torch.distributed.is_initialized():
        if os.environ["WORLD_SIZE"] != "1":
            raise ValueError("MASTER_PORT is not set although WORLD_SIZE > 1; start through deepspeed or torchrun")
        os.environ["MASTER_PORT"] = str(free_port())
    if device.kind == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        keep_freed_memory()
    # torch 2.13 renamed two collectives that DeepSpeed 0.19 still calls by their old names, several times a step.
    old_names = r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated"
    warnings.filterwarnings("ignore", message=old_names, category=FutureWarning)
    with muted():
        import deepspeed

        deepspeed.ops.__compatible_ops__ = {}  # type: ignore[attr-defined]  # read by its communication backend only
        deepspeed.init_distributed(device.backend, timeout=timedelta(seconds=timeout_s), verbose=False)


def stop() -> None:
    """Leave the process group."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def broadcast(value: Any, *, source: int = 0) -> Any:
    """`value` of rank `source`, on every rank."""
    box = [value]
    if torch.distributed.get_world_size() > 1:
        torch.distributed.broadcast_object_list(box, src=source)
    return box[0]


def gather(value: Any, *, group: Any = None) -> list[Any]:
    """The values of all ranks, by rank, on every rank. group: of all ranks, another than the world's own."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value, group=group)
    return values


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Keep what libraries print() to stdout off the console: DeepSpeed prints its partition and notes on every rank."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
