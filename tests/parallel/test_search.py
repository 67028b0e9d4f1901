"""The search finds what the rules allow, all of it and nothing else, and ranks it by time."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product

import pytest

from conf.cli import compose_config
from conf.schema import Config, Order, Recompute, Schedule
from parallel import memory, rules
from parallel.plan import ParallelPlan, PlanError
from parallel.prediction import predict_run, quick_step_s
from parallel.search import Candidate, Search, best, search
from parallel.topology import AXES, Topology
from tests.parallel.configs import measured_cluster, tiny

KEYS = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "schedule", "order", "sequence_parallel", "recompute",
    "zero_stage", "micro_batch_size",
)  # fmt: skip


def small(**changes) -> Config:
    """Four blocks, four heads, two key-value heads, on a machine of which all is known."""
    config = tiny(**{"train__global_batch_size": 16, "zero__stage": 1, **changes})
    return replace(config, cluster=measured_cluster())


def key(plan: ParallelPlan) -> tuple:
    return tuple(getattr(plan, name) for name in KEYS)


def everything(config: Config, world_size: int) -> set[tuple]:
    """Every combination of knobs that the rules accept, tried one by one."""
    found = set()
    degrees = range(1, world_size + 1)
    for tp, pp, schedule, sp, recompute, zero, micro in product(
        degrees, degrees, Schedule, (False, True), Recompute, range(4), (1, 2, 4, 8, 16, 32)
    ):
        if (pp == 1 and schedule.value != "1f1b") or (sp and tp == 1):
            continue  # without effect, or the same plan by another name
        changed = replace(
            config,
            parallel=replace(
                config.parallel, tp=tp, pp=pp, schedule=schedule, sequence_parallel=sp, recompute=recompute
            ),
            zero=replace(config.zero, stage=zero),
            train=replace(config.train, micro_batch_size=micro),
        )
        if not rules.problems(changed, world_size=world_size, device="cpu"):
            plan = ParallelPlan.from_config(changed, world_size, device="cpu")
            if plan.data_parallel_size > 1 or zero < 2:  # ZeRO 2 and 3 spread over a data axis
                found.add(key(plan))
    return found


CASES = {
    "4 ranks": (4, dict()),
    "8 ranks": (8, dict(train__global_batch_size=32)),
    "6 ranks": (6, dict(train__global_batch_size=12)),
    "odd length": (2, dict(data__sequence_length=31)),
    "wide heads": (4, dict(model__hidden_size=66, model__ffn_hidden_size=128)),
    "bf16": (4, dict(precision__dtype="bf16")),
    "offloaded": (4, dict(zero__offload_optimizer=True)),
    "ramp": (4, dict(train__batch_ramp_up=[8, 4, 64])),
}


@pytest.mark.parametrize(("world_size", "changes"), CASES.values(), ids=CASES)
def test_the_search_tries_exactly_what_the_rules_accept(world_size, changes):
    config = small(**changes)
    config.cluster.host.bandwidth = 1e9
    found = search(config, world_size, device="cpu", limit_bytes=None)
    tried = [candidate.plan for candidate in found.fitting]
    keys = [key(plan) for plan in tried]
    assert len(set(keys)) == len(keys) == found.considered
    default = tuple(Order["pipe_data_tensor"].value.split("_"))
    assert set(keys) == everything(config, world_size) and {plan.order for plan in tried} == {default}
    for candidate in found.fitting:
        again = ParallelPlan.from_config(candidate.config, world_size, device="cpu")
        assert key(again) == key(candidate.plan)
        assert again.num_micro_batches == candidate.plan.num_micro_batches
        assert again.padded_vocab_size == candidate.plan.padded_vocab_size
        assert all(last - first >= 1 for first, last in candidate.plan.stage_layers)


def test_no_stage_is_left_without_a_block():
    for candidate in search(small(), 4, device="cpu", limit_bytes=None).fitting:
        blocks = set(range(1, 5))
        for first, last in candidate.plan.stage_layers:
            assert blocks & set(range(first, last)), candidate.plan


def test_orders_whose_axes_lie_on_other_links_are_tried_and_of_equal_ones_one():
    config = small()
    link = config.cluster.intra_node
    config.cluster = measured_cluster(nodes=2, devices_per_node=2, inter_node=replace(link, bandwidth=1e8))
    found = search(config, 4, device="cpu", limit_bytes=None)
    for tp, pp in {(c.plan.tensor_model_parallel_size, c.plan.pipeline_model_parallel_size) for c in found.fitting}:
        spreads = [
            tuple(Topology(pp=pp, dp=4 // (tp * pp), tp=tp, order=order).spread(axis, 2) for axis in AXES)
            for order in {
                c.plan.order
                for c in found.fitting
                if (c.plan.tensor_model_parallel_size, c.plan.pipeline_model_parallel_size) == (tp, pp)
            }
        ]
        every = {
            tuple(Topology(pp=pp, dp=4 // (tp * pp), tp=tp, order=tuple(o.value.split("_"))).spread(a, 2) for a in AXES)
            for o in Order
        }
        assert sorted(map(str, spreads)) == sorted(map(str, every))


def test_what_fits_is_sorted_by_time_and_nothing_above_the_limit_is_ranked():
    config = small()
    whole = search(config, 4, device="cpu", limit_bytes=None)
    sizes = sorted(candidate.memory_bytes for candidate in whole.fitting)
    limit = sizes[len(sizes) // 3]
    found = search(config, 4, device="cpu", limit_bytes=limit)
    times = [candidate.step_s for candidate in found.fitting]
    assert times == sorted(times) and len(times) == sum(size <= limit for size in sizes)
    assert len(found.too_large) == len(sizes) - len(times)
    assert [c.memory_bytes for c in found.too_large] == sorted(c.memory_bytes for c in found.too_large)
    for candidate in found.fitting:
        ledgers = memory.predict(candidate.config, candidate.plan, device="cpu")
        assert max(ledger.total for ledger in ledgers) == candidate.memory_bytes <= limit
    pairs = best(found, world_size=4, device="cpu", limit_bytes=limit, count=5)
    assert 0 < len(pairs) <= 5 and all(candidate.memory_bytes <= limit for candidate, _ in pairs)
    fastest = min(prediction.step_s for _, prediction in pairs)
    assert pairs[0][1].step_s <= fastest * 1.01  # plans as fast as another stand by memory
    assert best(Search(), world_size=4, device="cpu", limit_bytes=limit, count=5) == []


def test_the_pareto_front_is_what_no_plan_beats_in_both():
    config = small()
    plan = ParallelPlan.from_config(config, 1)
    points = [(1.0, 90), (1.1, 95), (1.2, 50), (1.3, 60), (1.4, 20), (1.5, 21), (2.0, 10)]
    found = Search(fitting=[Candidate(config, plan, memory_bytes=m, step_s=s) for s, m in points])
    front = [
        (s, m) for s, m in points if not any(s2 <= s and m2 <= m and (s2, m2) != (s, m) for s2, m2 in points)
    ]  # fmt: skip
    assert [(c.step_s, c.memory_bytes) for c in found.pareto()] == front
    real = search(config, 8, device="cpu", limit_bytes=None)
    for candidate in real.pareto():
        for other in real.fitting:  # within 1 % counts as equal
            assert not (other.step_s < candidate.step_s and other.memory_bytes < 0.99 * candidate.memory_bytes)


def test_quick_times_are_the_simulated_ones_within_a_hundredth():
    found = search(small(), 8, device="cpu", limit_bytes=None)
    sample = found.fitting[:: max(1, len(found.fitting) // 40)]
    assert {candidate.plan.schedule for candidate in sample} == {schedule.value for schedule in Schedule}
    for candidate in sample:
        whole = predict_run(candidate.config, candidate.plan, device="cpu")
        assert candidate.step_s == pytest.approx(whole.step_s, rel=0.01), candidate.plan


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (dict(data__sequence_length=4096), "data.sequence_length=4096 is longer than"),
        (dict(precision__dtype="fp16"), "precision.dtype=fp16 is not supported on CPU"),
        (dict(model__num_key_value_heads=3), "model.num_key_value_heads=3 does not divide"),
        (dict(train__batch_ramp_up=[1, 2]), "train.batch_ramp_up"),
    ],
)
def test_what_no_plan_mends_is_said_before_anything_is_tried(changes, line):
    with pytest.raises(PlanError, match=line):
        search(small(**changes), 4, device="cpu", limit_bytes=None)


@pytest.mark.slow
def test_ten_thousand_plans_in_ten_seconds():
    """Of process time on one core; the guard is twice the aim, for a machine that others use."""
    words = "model=llama_70b cluster=dgx_h100 cluster.nodes=64 precision=bf16 data.sequence_length=4096"
    config = compose_config([*words.split(), "train.global_batch_size=2048"])
    start = time.process_time()
    found = search(config, 512, device="cuda", limit_bytes=config.cluster.memory_per_device)
    spent = time.process_time() - start
    each = spent / found.considered
    print(f"{found.considered} plans in {spent:.1f} s of process time, {1e4 * each:.1f} s for ten thousand")
    assert found.considered > 1000 and 1e4 * each < 20


def test_quick_step_s_is_what_a_candidate_carries():
    from parallel.kernels import Rates
    from parallel.links import Fabric
    from parallel.software import HERE
    from parallel.stage_times import LayerTimes

    candidate = search(small(), 4, device="cpu", limit_bytes=None).fitting[0]
    rates = Rates.from_config(candidate.config.cluster, candidate.config.precision.dtype)
    fabric = Fabric.from_config(candidate.config.cluster, world_size=4)
    assert quick_step_s(LayerTimes(candidate.config, candidate.plan, rates, fabric, HERE)) == candidate.step_s
