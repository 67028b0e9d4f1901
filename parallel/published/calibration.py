"""The numbers that tie a software stack on one GPU generation to the planner's formulas, and a prediction with them.

Fitted by `recipes/calibrate.py` on half of a stack's published rows, kept in calibrations.json with the ids of those
rows. Rates and links have the meaning and units of `conf.schema.RatesConfig` and `LinkConfig`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from parallel.kernels import Rates
from parallel.links import Fabric, Link
from parallel.prediction import quick_step_s
from parallel.published.rows import PublishedRun
from parallel.published.stacks import Stack
from parallel.stage_times import LayerTimes

CALIBRATIONS = Path(__file__).with_name("calibrations.json")


@dataclass(frozen=True)
class Calibration:
    matrix_flops: float
    operand_bandwidth: float
    attention_flops: float
    memory_bandwidth: float
    kernel_s: float
    micro_batch_s: float
    step_s: float
    intra_bandwidth: float
    intra_latency_s: float
    inter_bandwidth: float
    inter_latency_s: float
    unaligned_slowdown: float
    overlap: float
    fitted_on: tuple[str, ...] = ()

    def to_plain(self) -> dict[str, object]:
        """Four digits of each number."""
        return {name: float(f"{value:.4g}") for name, value in asdict(self).items() if name != "fitted_on"}


# Where a fit starts: about 0.8 of 16-bit peak, HBM and links' data sheets; kernels and latencies as commonly measured.
_DATA_SHEETS = {
    "V100": Calibration(95e12, 2e12, 60e12, 0.75e12, 6e-6, 2e-3, 0.02, 120e9, 8e-6, 10e9, 15e-6, 10.0, 0.9),
    "A100": Calibration(250e12, 6e12, 120e12, 1.3e12, 6e-6, 2e-3, 0.02, 200e9, 8e-6, 20e9, 15e-6, 10.0, 0.9),
    "H100": Calibration(650e12, 12e12, 350e12, 2.4e12, 5e-6, 2e-3, 0.02, 350e9, 8e-6, 40e9, 15e-6, 10.0, 0.9),
}


# What no GPU of that kind can exceed: dense 16-bit peak, HBM, one direction of its NVLinks, one port a GPU.
_LIMITS = {
    "V100": {"matrix_flops": 125e12, "memory_bandwidth": 0.9e12, "intra_bandwidth": 150e9, "inter_bandwidth": 12.5e9},
    "A100": {"matrix_flops": 312e12, "memory_bandwidth": 2.04e12, "intra_bandwidth": 300e9, "inter_bandwidth": 25e9},
    "H100": {"matrix_flops": 989e12, "memory_bandwidth": 3.35e12, "intra_bandwidth": 450e9, "inter_bandwidth": 50e9},
}


def limits(stack: Stack) -> dict[str, float]:
    """The largest value of each number that has one."""
    return {"overlap": 1.0} | next(limit for gpu, limit in _LIMITS.items() if stack.gpu.upper().startswith(gpu))


def data_sheet(stack: Stack) -> Calibration:
    """Where the fit of a stack starts."""
    return next(sheet for gpu, sheet in _DATA_SHEETS.items() if stack.gpu.upper().startswith(gpu))


def read_calibrations() -> dict[str, Calibration]:
    """Calibrations by the name of their stack."""
    plain = json.loads(CALIBRATIONS.read_text())
    return {name: Calibration(**(values | {"fitted_on": tuple(values["fitted_on"])})) for name, values in plain.items()}


def predicted_step_s(run: PublishedRun, calibration: Calibration) -> float:
    """Seconds of a step of a published run."""
    c = calibration
    rates = Rates(**{field.name: getattr(c, field.name) for field in fields(Rates)})
    intra, inter = (
        Link("NVLink", c.intra_bandwidth, c.intra_latency_s),
        Link("InfiniBand", c.inter_bandwidth, c.inter_latency_s),
    )
    fabric = Fabric(run.stack.per_node, intra, inter)
    software = replace(run.stack.software, unaligned_slowdown=c.unaligned_slowdown)
    return quick_step_s(LayerTimes(run.config, run.plan, rates, fabric, software))
