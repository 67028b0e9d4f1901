"""The probe of a cluster: links and rates measured on all ranks, fitted to the laws of plans, and shown beside them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from conf.schema import Config
from engine.device import Device
from engine.distributed import gather
from engine.probe_links import lines_to_measure, measure_host_link, measure_links, message_sizes
from engine.probe_overlap import Overlap, measure_overlap
from engine.probe_rates import Kernel, RateProbe
from engine.session import DTYPES
from parallel.fit_links import Sample, fit_link, predicted_s
from parallel.fit_rates import MatrixLaw, Product, fit_matrix_law
from parallel.fitting import mean_error
from parallel.hardware import peak_flops
from parallel.links import Link
from parallel.plan import ParallelPlan
from telemetry.tables import size, table

LARGEST_MESSAGE = {"cpu": 64 << 20, "cuda": 1 << 30}


@dataclass(frozen=True)
class FittedLink:
    """A link and the times it was fitted to; None where there were none."""

    link: Link | None
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Findings:
    """Everything measured on this cluster. Rates: FLOP/s and bytes/s of one device."""

    rank: int
    device_kind: str
    device_name: str
    dtype: str
    threads: int | None  # of a rank; None on an accelerator
    hosts: tuple[str, ...]  # of each rank
    memory_per_device: int
    peak_flops: float | None
    intra_node: FittedLink
    inter_node: FittedLink
    host: FittedLink
    products: tuple[Product, ...]
    matrix: MatrixLaw
    attention: tuple[Kernel, ...]
    attention_flops: float
    pointwise: tuple[Kernel, ...]
    memory_bandwidth: float
    overlap: Overlap | None  # None: one rank ran

    @property
    def nodes(self) -> int:
        return len(set(self.hosts))

    @property
    def devices_per_node(self) -> int:
        return max(self.hosts.count(host) for host in self.hosts)

    def text(self) -> str:
        """Tables of measured against fitted times, and what follows for links and rates."""
        parts = [
            _link_text("intra_node", self.intra_node, "one rank a host ran"),
            _link_text("inter_node", self.inter_node, "all ranks ran on one host"),
            _link_text("host", self.host, "the device is the host"),
            _products_text(self.products, self.matrix),
            _kernels_text(self.attention, self.attention_flops, "attention_flops", "FLOP/s"),
            _kernels_text(self.pointwise, self.memory_bandwidth, "memory_bandwidth", "bytes/s"),
            _overlap_text(self.overlap),
        ]
        return "\n\n".join(["", *parts])


def measure(config: Config, plan: ParallelPlan, *, device: Device, progress: Callable[[str], None]) -> Findings:
    """Measure everything. Called on all ranks alike, in a process group of the plan's world.

    Raises ValueError, on all ranks, where the sizes asked for do not determine a link.
    """
    chosen, dtype = config.probe, DTYPES[config.precision.dtype]
    hosts = gather(socket.gethostname())
    sizes = message_sizes(chosen.smallest_message, chosen.largest_message or LARGEST_MESSAGE[device.kind])
    lines = lines_to_measure(plan.topology, hosts)
    samples = measure_links(lines, hosts, device=device, dtype=dtype, sizes=sizes, chosen=chosen, progress=progress)
    copies = measure_host_link(device, sizes=sizes, chosen=chosen)
    rates = RateProbe(config, device=device, dtype=dtype)
    progress("rates: matrix products")
    products = rates.products()
    progress("rates: attention and pointwise kernels")
    attention, pointwise = rates.attention_cores(), rates.pointwise()
    memory_bandwidth = sum(kernel.work for kernel in pointwise) / sum(kernel.seconds for kernel in pointwise)
    cluster = config.cluster
    return Findings(
        rank=dist.get_rank(),
        device_name=device.name,
        device_kind=device.kind,
        dtype=config.precision.dtype.value,
        threads=device.threads,
        hosts=tuple(hosts),
        memory_per_device=device.memory_per_rank(),
        peak_flops=cluster.peak_flops or peak_flops(device.name, config.precision.dtype.value),
        intra_node=_fitted(
            [one for one in samples if one.spread.nodes == 1],
            cluster.intra_node.name or ("loopback" if device.kind == "cpu" else "intra_node"),
        ),
        inter_node=_fitted([one for one in samples if one.spread.nodes > 1], cluster.inter_node.name or "inter_node"),
        host=_fitted(copies, cluster.host.name or "PCIe"),
        products=tuple(products),
        matrix=fit_matrix_law(products, memory_bandwidth=memory_bandwidth),
        attention=tuple(attention),
        attention_flops=next(kernel.work / kernel.seconds for kernel in attention if kernel.configured),
        pointwise=tuple(pointwise),
        memory_bandwidth=memory_bandwidth,
        overlap=measure_overlap(device=device, dtype=dtype, chosen=chosen),
    )


def _fitted(samples: Sequence[Sample], name: str) -> FittedLink:
    return FittedLink(fit_link(samples, name=name) if samples else None, tuple(samples))


def _link_text(knob: str, fitted: FittedLink, absent: str) -> str:
    if fitted.link is None:
        return f"cluster.{knob}: not measured, {absent}"
    link, predicted = fitted.link, [predicted_s(one, fitted.link) for one in fitted.samples]
    rows = [
        (one.axis, one.operation, one.group_size, size(one.bytes), *_times(one.seconds, guess))
        for one, guess in zip(fitted.samples, predicted, strict=True)
    ]
    error = mean_error([one.seconds for one in fitted.samples], predicted)
    head = f"cluster.{knob}: {link.bandwidth / 1e9:.3g} GB/s, latency {link.latency_s * 1e6:.3g} us; "
    return f"{head}mean error {error:.0%}\n" + table(
        ("axis", "operation", "ranks", "size", "measured us", "fitted us", "error %"), rows
    )


def _products_text(products: Sequence[Product], law: MatrixLaw) -> str:
    rows = [
        (
            f"[{one.m}, {one.k}] x [{one.k}, {one.n}]",
            *_times(one.seconds, law.seconds(one)),
            _giga(one.flops / one.seconds),
        )
        for one in products
    ]
    error = mean_error([one.seconds for one in products], [law.seconds(one) for one in products])
    head = f"cluster.rates: matrix_flops {law.matrix_flops:.4g} FLOP/s, operand_bandwidth {law.operand_bandwidth:.4g} "
    head += f"bytes/s, kernel_s {law.kernel_s * 1e6:.3g} us; mean error {error:.0%}\n"
    return head + table(("product", "measured us", "fitted us", "error %", "GFLOP/s"), rows)


def _kernels_text(kernels: Sequence[Kernel], rate: float, knob: str, unit: str) -> str:
    rows = [(one.name, *_times(one.seconds, one.work / rate), _giga(one.work / one.seconds)) for one in kernels]
    return f"cluster.rates: {knob} {rate:.4g} {unit}\n" + table(
        ("kernel", "measured us", "fitted us", "error %", f"G{unit}"), rows
    )


def _overlap_text(overlap: Overlap | None) -> str:
    if overlap is None:
        return "cluster.rates: overlap not measured, one rank ran"
    text = f"cluster.rates: overlap {overlap.share:.2f}; all-reduce over all ranks {1e3 * overlap.collective_s:.3g} ms"
    return f"{text}, matrix products {1e3 * overlap.compute_s:.3g} ms, both at once {1e3 * overlap.both_s:.3g} ms"


def _times(measured_s: float, fitted_s: float) -> tuple[str, str, str]:
    return f"{measured_s * 1e6:.1f}", f"{fitted_s * 1e6:.1f}", f"{100 * (fitted_s / measured_s - 1):+.0f}"


def _giga(rate: float) -> str:
    return f"{rate / 1e9:.1f}"
