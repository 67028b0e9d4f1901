"""Overlap is counted by HolisticTraceAnalysis in a trace of known kernels, and made up nowhere."""

from __future__ import annotations

import gzip
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from telemetry.report import as_metrics
from telemetry.trace_overlap import INSTALL, Overlap, Profiled, overlap_in
from tests.telemetry.reports import report

GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_tn"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ANNOTATED = "gpu_user_annotation"

# name, stream, first and last microsecond. Communication runs 50 + 100 us, 50 of them beside the two products; from the
# first kernel to the last are 400 us: 200 compute, 110 communicate or copy alone, 90 are idle.
KERNELS = [
    (GEMM, 7, 0, 100),
    (ALL_REDUCE, 20, 50, 100),
    (GEMM, 7, 120, 220),
    (ALL_REDUCE, 20, 230, 330),
    ("Memcpy DtoH (Device -> Pageable)", 7, 390, 400),
]
ROOF = 500


def event(name: str, category: str, start: float, end: float, *, thread: int, process: int, **args: Any) -> dict:
    """A complete event as Kineto writes it."""
    return {
        "ph": "X", "cat": category, "name": name, "pid": process, "tid": thread, "ts": start, "dur": end - start,
        "args": args,
    }  # fmt: skip


def write(path: Path, kernels: list[tuple[str, int, int, int]]) -> Path:
    """A trace of one step of rank 3 on one GPU: launches on the host, kernels on their streams, annotations on both."""
    rows: list[dict] = [{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 0, "args": {"name": "python"}}]
    for category, process, thread in (("user_annotation", 77, 77), (ANNOTATED, 0, 7)):
        for name in ("ProfilerStep#10", "ForwardPass"):
            rows.append(event(name, category, 0, ROOF, thread=thread, process=process, **{"External id": 1}))
    for number, (name, stream, start, end) in enumerate(kernels, start=1):
        number_of = {"correlation": number, "External id": number}
        rows.append(
            event("cudaLaunchKernel", "cuda_runtime", start + 0.5, start + 1, thread=77, process=77, **number_of)
        )
        category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        on = {"device": 0, "context": 1, "stream": stream}
        rows.append(event(name, category, start, end, thread=stream, process=0, **on, **number_of))
    about = {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 4}}
    with gzip.open(path, "wt") as file:
        json.dump(about | {"traceEvents": rows}, file, indent=1)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "rank-3-steps-10.pt.trace.json.gz", KERNELS)


@pytest.mark.skipif(find_spec("hta") is None, reason=f"needs HolisticTraceAnalysis, which is optional: {INSTALL}")
def test_the_library_counts_a_third_of_the_communication_beside_computation(trace: Path, capfd) -> None:
    found = overlap_in(trace, rank=3)
    assert isinstance(found, Overlap)
    assert found.overlap_share == pytest.approx(50 / 150, abs=1e-4)  # the library rounds to a hundredth of a percent
    shares = (found.compute_share, found.other_share, found.idle_share)
    assert shares == pytest.approx((200 / 400, 110 / 400, 90 / 400), abs=1e-4)
    assert capfd.readouterr() == ("", ""), "nothing is said among the lines of training"


def test_without_the_library_one_line_says_what_to_install(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hta.trace_analysis", None)  # import raises ImportError
    found = overlap_in(trace, rank=3)
    assert isinstance(found, str) and "\n" not in found and INSTALL in found


def test_a_trace_of_a_cpu_or_without_communication_has_no_overlap(tmp_path: Path) -> None:
    assert "no GPU kernels" in str(overlap_in(write(tmp_path / "cpu.json.gz", []), rank=0))
    alone = write(tmp_path / "alone.json.gz", [KERNELS[0]])
    assert overlap_in(alone, rank=3) == "rank 3 ran no communication kernel"


def test_what_the_library_counted_stands_in_the_row_of_the_last_profiled_step() -> None:
    shares = {0: Overlap(0.2, 0.5, 0.3, 0.2), 2: Overlap(0.4, 0.5, 0.3, 0.2)}
    profiled = Profiled(10, 12, {0: "traces/a", 2: "traces/b"}, shares, ())
    assert as_metrics(report(profiled=profiled))["communication/overlap_share"] == pytest.approx(0.3)
    unknown = Profiled(10, 12, {0: "traces/a"}, {}, ("no GPU kernels",))
    assert "communication/overlap_share" not in as_metrics(report(profiled=unknown))
