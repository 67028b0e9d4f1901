"""How much of a rank's communication runs beside its computation, counted in a profiler's trace of its GPU.

HolisticTraceAnalysis (Meta's, MIT) counts: the share of the time in NCCL kernels in which other kernels run too, and
how the time from the first to the last kernel splits. It is no requirement: its package asks for jupyterlab, of which
none of this needs anything. A trace without GPU kernels (gloo on a CPU) has nothing to count, and none is made up.
"""

from __future__ import annotations

import gzip
import logging
import math
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INSTALL = "pip install --no-deps HolisticTraceAnalysis==0.5.0 plotly narwhals"  # pandas and networkx are here already
KERNEL, COLLECTIVE = re.compile(rb'"cat":\s*"kernel"'), re.compile(rb'"name":\s*"nccl\w*Kernel')


@dataclass(frozen=True)
class Overlap:
    """Shares: of the time in communication kernels; the other three of the time from the first kernel to the last."""

    overlap_share: float
    compute_share: float  # a computing kernel runs
    other_share: float  # communication or copies alone
    idle_share: float  # no kernel runs


@dataclass(frozen=True)
class Profiled:
    """What a window of profiled steps left. paths: by rank; overlaps: of those ranks where it is known."""

    first_step: int
    last_step: int
    paths: dict[int, str]
    overlaps: dict[int, Overlap]
    reasons: tuple[str, ...]  # why the overlap of others is not, or a trace was not written

    @property
    def steps(self) -> str:
        return (
            f"step {self.last_step}"
            if self.first_step == self.last_step
            else (f"steps {self.first_step} to {self.last_step}")
        )

    @property
    def overlap_share(self) -> float | None:
        """Mean of the ranks where it is known."""
        shares = [one.overlap_share for one in self.overlaps.values()]
        return sum(shares) / len(shares) if shares else None


def overlap_in(trace: Path, *, rank: int) -> Overlap | str:
    """Or why it is not known. trace: a Chrome trace of torch.profiler, .json or .json.gz."""
    kernels, collectives = _gpu_events(trace)
    if not kernels:
        return "the trace has no GPU kernels, and overlap is counted in these"
    if not collectives:
        return f"rank {rank} ran no communication kernel"
    try:
        overlap, split = _counted(trace, rank)
    except ImportError as error:
        return f"overlap is not worked out: {error}; {INSTALL}"
    except Exception as error:  # what the library makes of a trace must not end a training run
        return f"overlap is not worked out: HolisticTraceAnalysis raised {error!r}"
    if not math.isfinite(overlap):
        return f"rank {rank} ran no communication kernel that HolisticTraceAnalysis knows"
    return Overlap(
        overlap_share=overlap,
        **{f"{ours}_share": split[f"{theirs}_time_pctg"] / 100 for ours, theirs in _SPLIT.items()},
    )


_SPLIT = {"compute": "compute", "other": "non_compute", "idle": "idle"}


def _counted(trace: Path, rank: int) -> tuple[float, dict[str, float]]:
    """(overlap as a share, the split in percent)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it uses of pandas
        from hta.trace_analysis import TraceAnalysis

        logging.getLogger("hta").setLevel(logging.ERROR)  # it warns of how long it takes
        analysis = TraceAnalysis(
            trace_files={rank: str(trace)}, trace_dir=str(trace.parent), include_last_profiler_step=True
        )
        overlap = _row(analysis.get_comm_comp_overlap(visualize=False))["comp_comm_overlap_pctg"] / 100
        return overlap, _row(analysis.get_temporal_breakdown(visualize=False))


def _row(frame: Any) -> dict[str, float]:
    return {name: float(value) for name, value in frame.iloc[0].items()}


def _gpu_events(trace: Path) -> tuple[bool, bool]:
    """Whether there are kernels, and NCCL's: in the text, as a trace of a GPU has millions of events."""
    opened: Any = gzip.open if trace.suffix == ".gz" else open
    kernels = collectives = False
    with opened(trace, "rb") as file:
        for line in file:
            kernels = kernels or KERNEL.search(line) is not None
            collectives = collectives or COLLECTIVE.search(line) is not None
            if kernels and collectives:
                break
    return kernels, collectives
