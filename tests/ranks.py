"""Run a test's function on n forked gloo ranks.

A fork shares the parent's imports, so a test of collectives costs tenths of a second. Forking is safe only while torch
has not started threads of its own: the parent is held to one thread. Each rank's exception reaches the parent with its
traceback; ranks that outlive the timeout, or a failed peer, are killed, so none is left over.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from parallel.groups import AxisGroup

TIMEOUT_S = 240.0


class RankError(AssertionError):
    """One or more ranks failed; the message holds their tracebacks."""


def run_ranks(n: int, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """`function(*args)` on n ranks of one gloo world; the ranks' return values, in rank order.

    Called in the children: torch.distributed is initialised. Return values travel by pickle: no tensors that require
    gradients. Raises RankError with the tracebacks of all ranks that failed, or on timeout.
    """
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes: list[Connection] = []
        processes = []
        for rank in range(n):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(rank, n, f"{folder}/store", theirs, function, args), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            results = _collect(pipes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
            for process, pipe in zip(processes, pipes, strict=True):
                process.join()
                pipe.close()
    failures = [f"--- rank {rank} ---\n{text}" for rank, (good, text) in sorted(results.items()) if not good]
    missing = [rank for rank in range(n) if rank not in results]
    if missing:
        failures.append(f"ranks {missing} ended, or were killed after {timeout_s:.0f} s, without an answer")
    if failures:
        raise RankError("\n".join(failures))
    return [results[rank][1] for rank in range(n)]


def _collect(pipes: list[Connection], deadline: float) -> dict[int, tuple[bool, Any]]:
    """Answers by rank. After the first failure the peers, which may wait for the dead, have 2 s left."""
    results: dict[int, tuple[bool, Any]] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), timeout=left):
            rank = waiting.pop(pipe)  # type: ignore[call-overload]
            try:
                results[rank] = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                results[rank] = (False, "the process died without an answer")
            if not results[rank][0]:
                deadline = min(deadline, time.monotonic() + 2.0)
    return results


def _rank_main(
    rank: int, n: int, store: str, parent: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        if n > 1:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=n)
        answer = (True, function(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    parent.send(answer)
    with suppress(EOFError):  # the parent died
        parent.recv()  # stay until killed: peers may still read from this rank's sockets
    os._exit(0)


def tensor_axis(n: int) -> AxisGroup:
    """The whole world of n ranks as a tensor axis."""
    rank = dist.get_rank() if n > 1 else 0
    return AxisGroup("tensor", rank, n, tuple(range(n)), dist.group.WORLD if n > 1 else None)
