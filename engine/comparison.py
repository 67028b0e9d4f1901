"""Measurements to rates, ratios, a table and a JSON record. Pure arithmetic: nothing is run here.

Rates use the median step; tokens per CPU-second the process time of all ranks over all measured steps. A ratio is ours
over the peer's, so above 1 we are faster. Model FLOPs count as in `parallel.flops` (no recomputation, whole scores).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from engine.measure import Measurement
from telemetry.tables import size, table


@dataclass(frozen=True)
class Rates:
    """step_time_s: median; tokens_per_cpu_s: of CPU time summed over ranks; of_matmul_rate: model FLOP/s over what a
    matrix product reaches on as many cores; peak_memory_bytes: of the largest rank."""

    name: str
    ranks: int
    step_time_s: float
    tokens_per_s: float
    tokens_per_cpu_s: float
    model_flops_per_s: float
    of_matmul_rate: float
    peak_memory_bytes: int


@dataclass(frozen=True)
class Ratio:
    """Ours over the peer's."""

    ours: str
    peer: str
    tokens_per_s: float
    tokens_per_cpu_s: float


def rates(
    name: str, measurement: Measurement, *, ranks: int, tokens_per_step: int, flops_per_token: int, matmul_rate: float
) -> Rates:
    """The rates of one contender. `matmul_rate`: FLOP/s of a matrix product with all cores of the contender's ranks."""
    steps = measurement.step_times_s
    tokens_per_s = tokens_per_step / median(steps)
    return Rates(
        name=name,
        ranks=ranks,
        step_time_s=median(steps),
        tokens_per_s=tokens_per_s,
        tokens_per_cpu_s=tokens_per_step * len(steps) / measurement.cpu_s,
        model_flops_per_s=tokens_per_s * flops_per_token,
        of_matmul_rate=tokens_per_s * flops_per_token / matmul_rate,
        peak_memory_bytes=max(measurement.peak_bytes, default=0),
    )


def ratios(ours: Sequence[Rates], peers: Sequence[Rates]) -> list[Ratio]:
    """Each of ours over each peer."""
    return [
        Ratio(
            own.name,
            peer.name,
            own.tokens_per_s / peer.tokens_per_s,
            own.tokens_per_cpu_s / peer.tokens_per_cpu_s,
        )
        for own in ours
        for peer in peers
    ]


def rates_table(rows: Sequence[Rates]) -> str:
    """One line a contender."""
    header = ["contender", "ranks", "step s", "tokens/s", "tokens/CPU-s", "GFLOP/s", "of matmul", "memory/rank"]
    return table(
        header,
        [
            [
                row.name, row.ranks, f"{row.step_time_s:.3f}", f"{row.tokens_per_s:.0f}", f"{row.tokens_per_cpu_s:.0f}",
                f"{row.model_flops_per_s / 1e9:.1f}", f"{row.of_matmul_rate:.1%}", size(row.peak_memory_bytes),
            ]
            for row in rows
        ],
    )  # fmt: skip


def ratios_table(rows: Sequence[Ratio]) -> str:
    """One line a pair."""
    return table(
        ["ours", "over", "tokens/s", "tokens/CPU-s"],
        [[row.ours, row.peer, f"{row.tokens_per_s:.2f}", f"{row.tokens_per_cpu_s:.2f}"] for row in rows],
    )


def record(
    groups: Sequence[tuple[Sequence[Rates], Sequence[Rates]]],
    measurements: Mapping[str, Measurement],
    **setting: Any,
) -> dict[str, Any]:
    """Everything as plain values for JSON: setting, rates, ratios, and each measured step."""
    return {
        **setting,
        "contenders": [asdict(row) for ours, peers in groups for row in (*ours, *peers)],
        "ratios": [asdict(row) for ours, peers in groups for row in ratios(ours, peers)],
        "steps": {name: asdict(measurement) for name, measurement in measurements.items()},
    }
