"""Which axis lies on which link, and what each would cost elsewhere: why tensor collectives stay inside a node.

Every axis is priced twice, once on the link inside a node and once between nodes, with the same bytes and calls. What
may hide behind computation counts as far as it exceeds it. The axis that would lose most is kept inside first. Not
here: the price of one collective (`parallel.links`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conf.schema import Config
from parallel.collective import Collective
from parallel.communication import ledger
from parallel.links import Fabric, Link, collective_seconds
from parallel.plan import ParallelPlan
from parallel.topology import AXES, Spread

WEIGHT_GRADIENTS = 1 / 3  # of a step's products: what tensor collectives of backward run beside


@dataclass(frozen=True)
class AxisPrice:
    """What one axis costs the rank that speaks most on it, in a step."""

    axis: str
    group_size: int
    calls: int
    bytes: int  # of the tensors of all calls
    inside_s: float  # waited for, with all of a group on one node
    across_s: float  # with one rank of a group on each node
    placed_s: float  # as the plan places it
    link: str

    @property
    def loss_s(self) -> float:
        return self.across_s - self.inside_s


def prices(config: Config, plan: ParallelPlan, fabric: Fabric, *, compute_s: float) -> list[AxisPrice]:
    """Of each axis with more than one rank, the one that loses most by leaving a node first.

    compute_s: of a step, behind which what may hide does.
    """
    stages = [ledger(config, plan, pp_rank) for pp_rank in range(plan.pipeline_model_parallel_size)]
    found = []
    for axis in AXES:
        size = plan.topology.size(axis)
        if size == 1:
            continue
        of_stage = max(
            ([call for call in calls if call.axis == axis] for calls in stages),
            key=lambda calls: sum(call.total_bytes for call in calls),
        )
        placed_on = fabric.route(topology=plan.topology, axis=axis, pair=axis == "pipe")
        links = [fabric.link(Spread(1, size)), placed_on, placed_on]
        if fabric.inter_node is not None:
            links[1] = fabric.link(Spread(size, 1))
        beside_s = compute_s * (WEIGHT_GRADIENTS if axis == "tensor" else 1.0)
        overlap = config.cluster.rates.overlap
        inside, across, placed = (_waited_s(of_stage, link, overlap=overlap, beside_s=beside_s) for link in links)
        calls, total = sum(call.calls for call in of_stage), sum(call.total_bytes for call in of_stage)
        found.append(AxisPrice(axis, size, calls, total, inside, across, placed, links[2].name))
    return sorted(found, key=lambda price: price.loss_s, reverse=True)


def _waited_s(calls: Sequence[Collective], link: Link, *, overlap: float, beside_s: float) -> float:
    """Seconds of the calls on one link, less what hides beside so much computation (as in `parallel.stage_times`)."""
    open_s, behind_s = (
        sum(
            call.calls * collective_seconds(call.operation, call.bytes, group_size=call.group_size, link=link)
            for call in calls
            if call.hides is hides
        )
        for hides in (False, True)
    )
    return open_s + behind_s - overlap * min(behind_s, beside_s)


def warnings(config: Config, plan: ParallelPlan) -> list[str]:
    """A line where the tensor axis crosses nodes, with its price."""
    per_node = config.cluster.devices_per_node or -(-plan.world_size // config.cluster.nodes)
    tp = plan.tensor_model_parallel_size
    if plan.topology.spread("tensor", per_node).nodes == 1:
        return []
    moved = max(
        sum(call.total_bytes for call in ledger(config, plan, pp_rank) if call.axis == "tensor")
        for pp_rank in range(plan.pipeline_model_parallel_size)
    )
    line = f"parallel.tp={tp} in order {'_'.join(plan.order)} crosses nodes of {per_node} devices: "
    line += f"{moved / 1e9:.2f} GB a step and rank leave the node"
    try:
        fabric = Fabric.from_config(config.cluster, world_size=plan.world_size)
    except ValueError:
        return [f"{line}; keep tp within a node, with the tensor axis last in parallel.order"]
    price = next(price for price in prices(config, plan, fabric, compute_s=0.0) if price.axis == "tensor")
    return [
        f"{line}, {price.placed_s:.3g} s on {price.link} for {price.inside_s:.3g} s on {fabric.intra_node.name}; keep "
        "tp within a node, with the tensor axis last in parallel.order"
    ]
