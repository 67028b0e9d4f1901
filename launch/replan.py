"""Which plan a run goes on under when there are not as many ranks as before: chosen by the planner, or why none is.

What is computed stays: model, data, precision, global batch. With the cluster's rates known, the plan is the fastest of
those that fit, by prediction (`parallel.search`), on all the slots that are left or on a few less. Without them:

    keep tp, where it divides the slots of a host, else its largest divisor; under it use as many slots as a plan can;
    on these keep pp, else take the next larger, else the next smaller; keep the rest, where the rules allow it.

cluster.memory_per_device is a limit in both. Not here: which hosts are there (restarts.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from math import gcd
from typing import Any

from conf.hostfile import Slots, ranks
from conf.load import ConfigError
from conf.schema import Config, Recompute, Schedule
from parallel import memory, rules
from parallel.kernels import Rates
from parallel.links import Fabric
from parallel.plan import ParallelPlan, PlanError
from parallel.prediction import predict_run
from parallel.search import Candidate, best, search
from telemetry.tables import size

SMALL = 16  # ranks up to which every number is searched
CHANGED = ("parallel", "zero.stage", "train.micro_batch_size", "cluster.nodes", "cluster.devices_per_node")


@dataclass(frozen=True)
class Planned:
    """hosts: the slots that are used; overrides: behind the user's own, none where the plan is the configured one."""

    hosts: Slots
    overrides: tuple[str, ...]
    plan: dict[str, Any]
    chosen_by: str  # configuration, planner, order
    why: str


def planned(config: Config, hosts: Slots, *, most: int, device: str) -> Planned:
    """For `hosts`, where the configured plan is for `most` ranks. Raises ConfigError where no plan fits."""
    if ranks(hosts) >= most:
        tp = config.parallel.tp
        whole = _first(hosts, most, multiple=tp)
        used = whole if ranks(whole) == most else _first(hosts, most, multiple=1)
        return Planned(used, (), described(config, used, device=device), "configuration", "as configured")
    try:
        Rates.from_config(config.cluster, config.precision.dtype)
        Fabric.from_config(_on(config, hosts).cluster, world_size=ranks(hosts))
    except ValueError as error:
        return _in_order(config, hosts, device=device, no_rates=str(error))
    return _fastest(config, hosts, device=device)


def _first(hosts: Slots, world: int, *, multiple: int) -> Slots:
    """The first `world` slots, of each host a multiple; fewer where there are not so many."""
    taken, left = {}, world
    for name, slots in hosts.items():
        count = min(len(slots), left) // multiple * multiple
        if count:
            taken[name], left = slots[:count], left - count
    return taken


def _on(config: Config, hosts: Slots) -> Config:
    """The config with these hosts as its cluster; of hosts that differ, the largest equal parts count as machines."""
    per_node = gcd(*map(len, hosts.values()))
    nodes = ranks(hosts) // per_node
    return replace(config, cluster=replace(config.cluster, nodes=nodes, devices_per_node=per_node))


def _fastest(config: Config, hosts: Slots, *, device: str) -> Planned:
    limit, smallest = config.cluster.memory_per_device, list[int]()
    found: list[tuple[float, int, Candidate, Slots]] = []
    for used in _worlds(hosts, tp=config.parallel.tp):
        world = ranks(used)
        if found and world <= ranks(hosts) - max(map(len, hosts.values())):
            break  # a host's worth fewer is not tried where more ranks have a plan
        try:
            seen = search(_on(config, used), world, device=device, limit_bytes=limit)
        except PlanError as error:
            raise ConfigError(error.problems) from None
        smallest += [one.memory_bytes for one in seen.too_large[:1]]
        for candidate, _ in best(seen, world_size=world, device=device, limit_bytes=limit, count=1):
            found.append((candidate.step_s, candidate.memory_bytes, candidate, used))
    if not found:
        raise ConfigError([_none(hosts, f"the smallest takes {size(min(smallest))}" if smallest else "", config)])
    seconds, held, candidate, used = min(found, key=lambda one: one[:2])
    why = f"the fastest by prediction that fits: {seconds:.3g} s a step, {_against(held, limit)} on the worst rank"
    return _changed(config, candidate.config, used, device=device, chosen_by="planner", why=why)


def _worlds(hosts: Slots, *, tp: int) -> Iterator[Slots]:
    """Slots to search plans for, most first: a host's worth fewer at most, and small numbers, for which few plans are
    legal. Both with the odd slots of hosts that tp does not divide, and without.
    """
    inside = _first(hosts, ranks(hosts), multiple=tp)
    pools = [hosts, inside] if inside and inside != hosts else [hosts]
    for world in range(ranks(hosts), 0, -1):
        for pool in pools if world > ranks(hosts) - max(map(len, hosts.values())) or world <= SMALL else ():
            if world <= ranks(pool):
                yield _first(pool, world, multiple=gcd(world, *map(len, pool.values())))


def _in_order(config: Config, hosts: Slots, *, device: str, no_rates: str) -> Planned:
    limit, reasons = config.cluster.memory_per_device, dict[str, None]()
    for used, changed in _variants(config, hosts):
        world = ranks(used)
        problems = rules.problems(changed, world_size=world, device=device)
        if problems:
            reasons[problems[0]] = None
            continue
        held = memory.predict_worst(changed, ParallelPlan.from_config(changed, world, device=device), device=device)
        if limit is None or held.total <= limit:
            why = f"the first in order that fits: {_against(held.total, limit)} on the worst rank; "
            why += f"times cannot be predicted: {no_rates.partition(';')[0]}"
            return _changed(config, changed, used, device=device, chosen_by="order", why=why)
        reasons[f"tp={changed.parallel.tp} x pp={changed.parallel.pp} takes {size(held.total)}"] = None
    raise ConfigError([_none(hosts, "; ".join(list(reasons)[:3]), config)])


def _variants(config: Config, hosts: Slots) -> Iterator[tuple[Slots, Config]]:
    """Slots and plans in the order that this file's head tells. Only where nothing fits: more recomputation, and then
    a tensor axis that leaves its host.
    """
    kinds = list(Recompute)
    kinds = kinds[kinds.index(config.parallel.recompute) :]
    tps = [tp for tp in range(config.parallel.tp, 0, -1) if config.parallel.tp % tp == 0]
    for inside, recompute, tp in product((True, False), kinds, tps):
        unit = tp if inside else 1
        for world in range(ranks(_first(hosts, ranks(hosts), multiple=unit)) // tp * tp, 0, -tp):
            used = _first(hosts, world, multiple=unit)
            for pp in _stages(config.parallel.pp, world // tp):
                yield from ((used, _split(config, used, tp, pp, s, recompute)) for s in _schedules(config, pp))


def _stages(configured_pp: int, most: int) -> list[int]:
    """Divisors of `most`: the configured number, then larger ones (a stage holds less), then smaller ones."""
    fitting = [pp for pp in range(1, most + 1) if most % pp == 0]
    return [
        *(pp for pp in fitting if pp == configured_pp),
        *(pp for pp in fitting if pp > configured_pp),
        *(pp for pp in reversed(fitting) if pp < configured_pp),
    ]


def _schedules(config: Config, pp: int) -> list[Schedule]:
    plain, own = Schedule["1f1b"], config.parallel.schedule
    return [plain] if pp == 1 or own is plain else [own, plain]


def _split(config: Config, hosts: Slots, tp: int, pp: int, schedule: Schedule, recompute: Recompute) -> Config:
    """The config with these degrees; the micro-batch no larger than it was, as large as the global batch allows."""
    train, own = config.train, config.parallel
    samples = train.global_batch_size // max(1, ranks(hosts) // (tp * pp))
    micro_batch = max((n for n in range(1, train.micro_batch_size + 1) if samples % n == 0), default=1)
    cut = own.stages if own.stages == "profile" or (pp, schedule) == (own.pp, own.schedule) else None
    parallel = replace(own, tp=tp, pp=pp, schedule=schedule, recompute=recompute, stages=cut)
    return replace(_on(config, hosts), parallel=parallel, train=replace(train, micro_batch_size=micro_batch))


def _changed(config: Config, chosen: Config, hosts: Slots, *, device: str, chosen_by: str, why: str) -> Planned:
    parallel = replace(chosen.parallel, name="custom")  # no profile of that name was promoted as this plan
    chosen = replace(chosen, parallel=parallel)
    overrides = [
        f"{key}={_typed(new)}"
        for (key, old), (_, new) in zip(_knobs(config), _knobs(chosen), strict=True)
        if old != new
    ]
    return Planned(hosts, tuple(overrides), described(chosen, hosts, device=device), chosen_by, why)


def _knobs(config: Config) -> list[tuple[str, Any]]:
    """What a plan may change, by key."""
    found = [(f"parallel.{one.name}", getattr(config.parallel, one.name)) for one in fields(config.parallel)]
    for section, name in (key.split(".") for key in CHANGED if "." in key):
        found.append((f"{section}.{name}", getattr(getattr(config, section), name)))
    return found


def _typed(value: Any) -> str:
    """As an override says it: null, true, [3,5], 1f1b."""
    plain = getattr(value, "value", value)
    return plain if isinstance(plain, str) else json.dumps(plain, separators=(",", ":"))


def described(config: Config, hosts: Slots, *, device: str | None) -> dict[str, Any]:
    """A plan for a record, with what is predicted of it where the cluster's rates are known."""
    world = ranks(hosts)
    plan = ParallelPlan.from_config(config, world, device=device)
    found: dict[str, Any] = {
        "label": plan.label, "ranks": world, "schedule": plan.schedule, "recompute": plan.recompute,
        "micro_batch_size": plan.micro_batch_size, "num_micro_batches": plan.num_micro_batches,
        "blocks_per_stage": plan.blocks_per_stage,
        "memory_bytes": memory.predict_worst(config, plan, device=device or "cuda").total,
    }  # fmt: skip
    try:
        return found | {"step_s": predict_run(config, plan, device=device).step_s}
    except ValueError:  # no rates: a plan is recorded all the same
        return found


def _none(hosts: Slots, reason: str, config: Config) -> str:
    slots = ", ".join(f"{name} {len(one)}" for name, one in hosts.items())
    limit = config.cluster.memory_per_device
    room = "" if limit is None else f" with {size(limit)} on a device"
    return f"no plan fits the {ranks(hosts)} slots that are left ({slots}){room}" + (f": {reason}" if reason else "")


def _against(held: float, limit: float | None) -> str:
    return size(held) if limit is None else f"{size(held)} of {size(limit)}"
