"""The plan that a run goes on under with fewer ranks: what is kept, what is chosen, and what is refused."""

from __future__ import annotations

import pytest

from conf.cli import compose_config
from conf.load import ConfigError, to_plain
from launch.replan import Planned, planned
from parallel import memory
from parallel.plan import ParallelPlan

TINY = ["model=llama_tiny", "data.sequence_length=32", "train.global_batch_size=8"]
H100 = [
    "model=llama_8b", "cluster=dgx_h100", "cluster.nodes=4", "precision=bf16", "data.sequence_length=4096",
    "train.global_batch_size=64", "parallel=tp8_pp8", "parallel.pp=4",
]  # fmt: skip
MAY_DIFFER = {"parallel", "zero.stage", "train.micro_batch_size", "cluster.nodes", "cluster.devices_per_node"}


def hosts(*slots: int) -> dict[str, list[int]]:
    return {f"w{number}": list(range(count)) for number, count in enumerate(slots)}


def plan_of(words: list[str], found: Planned, device: str = "cpu") -> ParallelPlan:
    """As the ranks will derive it from the command line; only what a plan may change differs."""
    before, after = compose_config(words), compose_config([*words, *found.overrides])
    plain = {name: {**to_plain(after)[name]} for name in ("model", "data", "train", "optimizer", "precision", "zero")}
    for name, section in plain.items():
        expected = to_plain(before)[name]
        differing = {f"{name}.{key}" for key in section if section[key] != expected[key]}
        assert differing <= MAY_DIFFER
    return ParallelPlan.from_config(after, sum(map(len, found.hosts.values())), device=device)


@pytest.mark.parametrize(
    ("words", "left", "most", "label", "used"),
    [
        (["parallel=tp2_pp2"], (2, 2), 8, "tp2_pp2_dp1_zero1", (2, 2)),  # dp shrinks alone
        (["parallel=tp2_pp2"], (2,), 4, "tp2_pp1_dp1_zero1", (2,)),  # tp before pp
        (["parallel=tp2_pp2"], (2, 1), 4, "tp2_pp1_dp1_zero1", (2,)),  # inside a host: the odd slot stays idle
        (["parallel=tp1_pp2"], (1, 1, 1), 4, "tp1_pp3_dp1_zero1", (1, 1, 1)),  # all of them, by more stages
        (["parallel=tp1"], (1, 1, 1), 4, "tp1_pp3_dp1_zero1", (1, 1, 1)),  # dp=3 does not divide 8 samples
        (["parallel=tp1", "zero=stage3"], (1, 1, 1), 4, "tp1_pp1_dp2_zero3", (1, 1)),  # nor may ZeRO 3 have stages
        (["parallel=tp2"], (1, 1), 4, "tp1_pp1_dp2_zero1", (1, 1)),  # no host has room for tp=2
        (["parallel=tp2_pp2_dualpipev"], (2,), 4, "tp2_pp1_dp1_zero1", (2,)),  # one stage has no such schedule
        (["parallel=tp1_pp2", "parallel.stages=[1,3]"], (1,), 2, "tp1_pp1_dp1_zero1", (1,)),
    ],
)
def test_without_rates_tp_is_kept_then_the_ranks_then_pp(words, left, most, label, used):
    words = [*TINY, *words]
    found = planned(compose_config(words), hosts(*left), most=most, device="cpu")
    plan = plan_of(words, found)
    assert plan.label == found.plan["label"] == label and found.chosen_by == "order"
    assert tuple(map(len, found.hosts.values())) == used
    assert "times cannot be predicted: cluster.rates of cluster=local has no matrix_flops" in found.why


def test_the_micro_batch_is_the_largest_up_to_the_configured_one_that_divides_the_global_batch():
    words = [*TINY, "train.global_batch_size=12", "train.micro_batch_size=3", "parallel=tp1"]
    plan = plan_of(words, planned(compose_config(words), hosts(1, 1, 1), most=4, device="cpu"))
    assert (plan.data_parallel_size, plan.micro_batch_size, plan.num_micro_batches) == (3, 2, 2)
    assert plan.global_batch_size == 12


@pytest.mark.parametrize(("left", "used"), [((2, 2), (2, 2)), ((2, 2, 2), (2, 2)), ((1, 4), (4,)), ((8,), (4,))])
def test_with_as_many_ranks_as_before_the_configured_plan_is_taken_and_no_more_ranks(left, used):
    config = compose_config([*TINY, "parallel=tp2_pp2"])
    found = planned(config, hosts(*left), most=4, device="cpu")
    assert (found.overrides, found.chosen_by) == ((), "configuration")
    assert tuple(map(len, found.hosts.values())) == used


def test_with_rates_the_planner_takes_the_fastest_of_those_that_fit():
    config = compose_config(H100)
    found = planned(config, hosts(8, 8, 8), most=32, device="cuda")
    plan = plan_of(H100, found, device="cuda")
    assert found.chosen_by == "planner" and plan.label == found.plan["label"]
    assert plan.tensor_model_parallel_size <= 8 and plan.world_size <= 24 and plan.global_batch_size == 64
    after = compose_config([*H100, *found.overrides])
    assert memory.worst(memory.predict(after, plan, device="cuda")).total <= 80e9
    assert f"{found.plan['step_s']:.3g} s a step" in found.why and " of 80.0 GB on the worst rank" in found.why
    in_order = planned(compose_config([*H100, "cluster.rates.kernel_s=null"]), hosts(8, 8, 8), most=32, device="cuda")
    assert in_order.chosen_by == "order" and in_order.plan["label"].startswith("tp8_pp")


@pytest.mark.parametrize(
    ("words", "left", "device", "line"),
    [
        (
            [*TINY, "parallel=tp1", "cluster.memory_per_device=1e6"], (1,), "cpu",
            r"no plan fits the 1 slots that are left \(w0 1\) with 1.0 MB on a device: tp=1 x pp=1 takes \d.\d MB",
        ),
        (
            ["model=llama_70b", *H100[1:]], (8,), "cuda",
            r"no plan fits the 8 slots .* with 80.0 GB on a device: the smallest takes 1\d\d.\d GB",
        ),
    ],
)  # fmt: skip
def test_where_no_plan_fits_one_line_says_why(words, left, device, line):
    with pytest.raises(ConfigError, match=line) as refused:
        planned(compose_config(words), hosts(*left), most=32, device=device)
    assert len(refused.value.problems) == 1


def test_recomputation_is_taken_up_where_nothing_fits_without():
    words = [*TINY, "parallel=tp1", "data.sequence_length=512"]
    config = compose_config(words)
    whole = planned(config, hosts(1), most=2, device="cpu").plan["memory_bytes"]
    words.append(f"cluster.memory_per_device={whole - 1}")
    plan = plan_of(words, planned(compose_config(words), hosts(1), most=2, device="cpu"))
    assert plan.recompute != "none" and plan.label == "tp1_pp1_dp1_zero1"
