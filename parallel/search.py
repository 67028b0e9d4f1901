"""All legal plans for a world and a global batch, filtered by memory, ranked by predicted step time.

Plans whose tensor axis leaves a node are ranked only where no other fits: their price stands on what the model knows
least, small messages between nodes on every layer.

Two passes. The first builds every plan with stages cut by FLOPs, asks the memory ledger whether it fits and the closed
forms of `parallel.step_time` how long a step takes. The second cuts the best of them by predicted seconds and predicts
them whole, event by event. Not here: what a prediction is (`parallel.prediction`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt

from conf.schema import Config, Order, ParallelConfig, Recompute, Schedule
from parallel import memory, rules
from parallel.flops import block_flops_per_token, head_flops_per_token
from parallel.kernels import Rates
from parallel.links import Fabric
from parallel.plan import ParallelPlan, PlanError, padded_vocab_size
from parallel.prediction import Prediction, predict_run, quick_step_s
from parallel.sizes import sizes
from parallel.software import HERE
from parallel.stage_times import LayerTimes
from parallel.stages import LayerSeconds, Load, balance, boundaries, fold
from parallel.topology import AXES, Topology

SAME_TIME = 0.01  # plans whose times differ by less are ranked by memory: the prediction is no finer


@dataclass(frozen=True)
class Candidate:
    """A legal plan after the first pass; `config` is the searched one with this plan's knobs."""

    config: Config
    plan: ParallelPlan
    memory_bytes: int = 0  # of the worst stage
    step_s: float = 0.0  # of what fits

    @property
    def crosses_nodes(self) -> bool:
        """Whether some tensor group has ranks on more than one node."""
        per_node = self.config.cluster.devices_per_node
        return per_node is not None and self.plan.topology.spread("tensor", per_node).nodes > 1


@dataclass
class Search:
    """`fitting` by time, the fastest first; `too_large` by memory, the smallest first."""

    considered: int = 0
    fitting: list[Candidate] = field(default_factory=list)
    too_large: list[Candidate] = field(default_factory=list)

    @property
    def ranked(self) -> list[Candidate]:
        """Those that keep the tensor axis inside a node; the others only where there are none."""
        return [candidate for candidate in self.fitting if not candidate.crosses_nodes] or self.fitting

    def pareto(self) -> list[Candidate]:
        """Ranked plans than which none is both faster and smaller, the fastest first."""
        found: list[Candidate] = []
        for candidate in self.ranked:
            if not found or candidate.memory_bytes < found[-1].memory_bytes * (1 - SAME_TIME):
                found.append(candidate)
        return found


def search(config: Config, world_size: int, *, device: str, limit_bytes: float | None) -> Search:
    """Try every plan. Raises ValueError where the cluster has no rates or links, and for what no plan mends.

    limit_bytes: of one device; None: everything fits.
    """
    rates, fabric = (
        Rates.from_config(config.cluster, config.precision.dtype),
        Fabric.from_config(config.cluster, world_size=world_size),
    )
    _check(config, device=device)
    found = Search()
    for candidate in _candidates(config, world_size, device=device):
        held = memory.predict_worst(candidate.config, candidate.plan, device=device).total
        found.considered += 1
        if limit_bytes is not None and held > limit_bytes:
            found.too_large.append(replace(candidate, memory_bytes=held))
            continue
        times = LayerTimes(candidate.config, candidate.plan, rates, fabric, HERE)
        found.fitting.append(replace(candidate, memory_bytes=held, step_s=quick_step_s(times)))
    found.fitting.sort(key=lambda candidate: candidate.step_s)
    found.too_large.sort(key=lambda candidate: candidate.memory_bytes)
    return found


def _check(config: Config, *, device: str) -> None:
    """Raises PlanError with what is wrong under every plan: under the one that asks least."""
    least = replace(
        config,
        parallel=ParallelConfig(),
        zero=replace(config.zero, stage=1),
        train=replace(config.train, micro_batch_size=1),
        cluster=replace(config.cluster, nodes=1, devices_per_node=1),
    )
    problems = rules.problems(least, world_size=1, device=device)
    if problems:
        raise PlanError(problems)


def best(
    found: Search, *, world_size: int, device: str, limit_bytes: float | None, count: int
) -> list[tuple[Candidate, Prediction]]:
    """The `count` fastest plans that fit, predicted whole; of plans as fast as another the smaller one first."""
    whole = []
    for candidate in found.ranked[: 2 * count]:
        config = _cut_by_seconds(candidate, world_size, device=device)
        plan = ParallelPlan.from_config(config, world_size, device=device)
        prediction = predict_run(config, plan, device=device)
        held = memory.worst(prediction.ledgers).total
        if limit_bytes is None or held <= limit_bytes:
            whole.append((Candidate(config, plan, held, prediction.step_s), prediction))
    if not whole:
        return []
    fastest = min(candidate.step_s for candidate, _ in whole)
    whole.sort(key=lambda pair: (max(pair[0].step_s, fastest * (1 + SAME_TIME)), pair[0].memory_bytes))
    return whole[:count]


def layer_seconds(config: Config, plan: ParallelPlan) -> LayerSeconds:
    """Predicted forward and backward seconds of each kind of layer, for one micro-batch."""
    rates = Rates.from_config(config.cluster, config.precision.dtype)
    times = LayerTimes(config, plan, rates, Fabric.from_config(config.cluster, world_size=plan.world_size), HERE)
    return LayerSeconds(*(kind.forward_s + kind.backward_s for kind in (times.embedding, times.block, times.head)))


def _cut_by_seconds(candidate: Candidate, world_size: int, *, device: str) -> Config:
    """The candidate's config with its stages written out, balanced by predicted seconds instead of FLOPs."""
    config, pp = candidate.config, candidate.plan.pipeline_model_parallel_size
    if pp == 1:
        return config
    seconds = layer_seconds(config, candidate.plan)
    plan = ParallelPlan.from_config(config, world_size, device=device, layer_seconds=seconds)
    return replace(config, parallel=replace(config.parallel, stages=plan.blocks_per_stage))


def _candidates(config: Config, world_size: int, *, device: str) -> Iterator[Candidate]:
    """Every plan that the rules allow, not yet predicted."""
    zero_stages = _zero_stages(config, device=device)
    cuts: dict[tuple[str, int], tuple[tuple[int, int], ...] | None] = {}
    for tp, pp, schedule, order in _meshes(config, world_size):
        key = (schedule.value, pp)
        if key not in cuts:
            cuts[key] = _cut(config, schedule.value, pp)
        cut = cuts[key]
        if cut is None:
            continue
        dp = world_size // (tp * pp)
        for micro_batch in _micro_batches(config, dp):
            count = config.train.global_batch_size // (micro_batch * dp)
            if schedule.value == "dualpipev" and count < 2 * pp:
                continue
            for sequence_parallel, recompute, zero in _modes(config, zero_stages, tp=tp, pp=pp, dp=dp):
                parallel = replace(
                    config.parallel, tp=tp, pp=pp, schedule=schedule, order=order, recompute=recompute,
                    sequence_parallel=sequence_parallel, stages=None, recompute_interval=1,
                )  # fmt: skip
                changed = replace(
                    config,
                    parallel=parallel,
                    zero=replace(config.zero, stage=zero),
                    train=replace(config.train, micro_batch_size=micro_batch),
                )
                plan = ParallelPlan(
                    tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, data_parallel_size=dp,
                    world_size=world_size, sequence_parallel=sequence_parallel, schedule=schedule.value,
                    zero_stage=zero, micro_batch_size=micro_batch, global_batch_size=config.train.global_batch_size,
                    num_micro_batches=count, batch_ramp_up=None,
                    padded_vocab_size=padded_vocab_size(
                        config.model.vocab_size, divisor=config.model.make_vocab_size_divisible_by, tp=tp
                    ),
                    stage_layers=cut, recompute=recompute.value, recompute_interval=1, warnings=(),
                    order=tuple(order.value.split("_")),
                )  # fmt: skip
                if not rules.problems(changed, world_size=world_size, device=device):
                    yield Candidate(changed, plan)


def _meshes(config: Config, world_size: int) -> Iterator[tuple[int, int, Schedule, Order]]:
    """(tp, pp, schedule, order) that divide the world and the model; of orders with equal links the first."""
    model, heads = config.model, config.model.num_attention_heads
    key_value = sizes(model).num_key_value_heads
    per_node = config.cluster.devices_per_node or -(-world_size // config.cluster.nodes)
    for tp in _divisors(heads):
        fits = key_value % tp == 0 or tp % key_value == 0
        if world_size % tp or not fits or sizes(model).ffn_hidden_size % tp:
            continue
        for pp in _divisors(world_size // tp):
            if pp > model.num_layers:
                continue
            seen = set()
            for order in Order:
                axes = tuple(order.value.split("_"))
                topology = Topology(pp=pp, dp=world_size // (tp * pp), tp=tp, order=axes)
                links = tuple(topology.spread(axis, per_node) for axis in AXES)
                if links in seen:
                    continue
                seen.add(links)
                for schedule in Schedule if pp > 1 else (Schedule["1f1b"],):
                    yield tp, pp, schedule, order


def _modes(
    config: Config, zero_stages: Sequence[int], *, tp: int, pp: int, dp: int
) -> Iterator[tuple[bool, Recompute, int]]:
    """(sequence parallel, recomputation, ZeRO stage)."""
    most = 3 if pp == 1 and dp > 1 else 1
    for sequence_parallel in (False, True) if tp > 1 and config.data.sequence_length % tp == 0 else (False,):
        for recompute in Recompute:
            for zero in zero_stages:
                if zero <= most:
                    yield sequence_parallel, recompute, zero


def _zero_stages(config: Config, *, device: str) -> list[int]:
    """Those that go with the run's precision."""
    return [
        stage
        for stage in (0, 1, 2, 3)
        if not rules.states_problems(
            replace(config, zero=replace(config.zero, stage=stage), parallel=replace(config.parallel, pp=1)),
            device=device,
        )
    ]


def _micro_batches(config: Config, dp: int) -> list[int]:
    """Powers of two that share out the global batch, and the configured size."""
    batch = config.train.global_batch_size
    if batch % dp:
        return []
    per_rank = batch // dp
    sizes_ = {2**power for power in range(per_rank.bit_length())} | {config.train.micro_batch_size}
    return sorted(size for size in sizes_ if per_rank % size == 0)


def _cut(config: Config, schedule: str, pp: int) -> tuple[tuple[int, int], ...] | None:
    """Stages by cost alone; None where there are too few blocks."""
    model = config.model
    block, head = block_flops_per_token(model, config.data.sequence_length), head_flops_per_token(model)
    last = 0 if schedule == "dualpipev" else pp - 1
    loads = [Load(head if stage == last else 0, block) for stage in range(pp)]
    least = 2 if schedule == "dualpipev" else 1
    if model.num_layers < least * pp:
        return None
    counts = balance(model.num_layers, loads, least=least)
    return boundaries(fold(counts, head_in_blocks=head / block) if schedule == "dualpipev" else counts)


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
