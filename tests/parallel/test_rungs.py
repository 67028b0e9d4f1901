"""The ladder: one device first, each dimension alone, all together, and a restart at each of these scales."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from conf.cli import compose_config
from conf.schema import Config
from parallel.plan import ParallelPlan
from parallel.rungs import Rung, composed, rungs

TINY = ("model=llama_tiny", "parallel=tp2_pp2")
compose_once = functools.cache(lambda *words: compose_config([*TINY, *words]))


def climbed(*words: str, ranks: int = 4) -> tuple[Config, list[Rung]]:
    config = compose_once(*words)
    return config, rungs(config, ranks=ranks, device="cpu")


def planned(rung: Rung, *words: str) -> tuple[Config, ParallelPlan]:
    """As the rung's own process composes it."""
    config = compose_once(*words, *rung.overrides)
    return config, ParallelPlan.from_config(config, rung.ranks, device="cpu")


def test_the_order_is_one_device_each_alone_composed_and_the_restarts():
    _, found = climbed("parallel.sequence_parallel=true")
    scales = ["one device", "tp alone", "pp alone", "dp alone with ZeRO 1", "sequence parallel", "composed"]
    assert [rung.name for rung in found[:6]] == scales
    restarts = [(rung.name, rung.resumes) for rung in found[6:]]
    same = [(f"{name}, restarted", name) for name in scales]
    into = [(f"{name}, restarted composed", name) for name in scales[:-1]]
    assert sorted(restarts) == sorted(same + into)


def test_a_dimension_that_the_profile_does_not_use_has_no_rung():
    _, found = climbed("parallel=tp2", ranks=2)
    assert [rung.name for rung in found[:4]] == ["one device", "tp alone", "dp alone with ZeRO 1", "composed"]


def test_each_rung_changes_one_dimension_only():
    words = ("parallel.sequence_parallel=true", "parallel.schedule=eager1f1b", "parallel.recompute=full")
    config, found = climbed(*words, "train.global_batch_size=16", ranks=8)
    degrees = {}
    for rung in found[:6]:
        chosen, plan = planned(rung, *words, "train.global_batch_size=16")
        degrees[rung.name] = (
            plan.tensor_model_parallel_size, plan.pipeline_model_parallel_size, plan.data_parallel_size,
            plan.sequence_parallel, plan.zero_stage, plan.schedule, plan.recompute,
        )  # fmt: skip
        assert chosen.model == config.model and chosen.train == config.train and chosen.data == config.data
    assert degrees == {
        "one device": (1, 1, 1, False, 0, "1f1b", "none"),
        "tp alone": (2, 1, 1, False, 0, "1f1b", "none"),
        "pp alone": (1, 2, 1, False, 0, "eager1f1b", "none"),
        "dp alone with ZeRO 1": (1, 1, 2, False, 1, "1f1b", "none"),
        "sequence parallel": (2, 1, 1, True, 0, "1f1b", "none"),
        "composed": (2, 2, 2, True, 1, "eager1f1b", "full"),
    }


def test_composed_runs_the_profile_untouched_and_the_others_go_by_another_name():
    config, found = climbed()
    for rung in found:
        chosen, _ = planned(rung)
        whole = rung.name in ("composed", "composed, restarted") or rung.name.endswith("restarted composed")
        assert (chosen.parallel == config.parallel) is whole, rung.name
        assert (chosen.parallel.name == "tp2_pp2") is whole


def test_16_bit_with_fp32_sums_keeps_the_zero_it_cannot_do_without():
    _, found = climbed("precision=bf16")
    for rung in found:
        assert planned(rung, "precision=bf16")[1].zero_stage == 1


def test_the_data_axis_is_climbed_at_the_whole_plans_size_and_at_two_where_that_is_one():
    for ranks, expected in ((4, 2), (8, 2), (16, 4)):
        _, found = climbed("train.global_batch_size=32", ranks=ranks)
        [rung] = [rung for rung in found if rung.name == "dp alone with ZeRO 1"]
        assert rung.ranks == expected


def test_a_cluster_of_fixed_nodes_lends_each_rung_what_it_needs():
    words = ["cluster.devices_per_node=4", "cluster.nodes=2", "train.global_batch_size=16"]
    config, found = climbed(*words, ranks=8)
    assert composed(config, 8) == config
    for rung in found:
        chosen, plan = planned(rung, *words)
        assert chosen.cluster.nodes * chosen.cluster.devices_per_node == plan.world_size == rung.ranks


def test_a_rung_that_cannot_be_planned_is_named_with_its_rule():
    config = compose_once("train.global_batch_size=3")
    with pytest.raises(ValueError, match=r"rung dp alone with ZeRO 1: train.global_batch_size=3 is not a multiple of"):
        rungs(config, ranks=4, device="cpu")
    whole = replace(config, train=replace(config.train, global_batch_size=4))
    assert rungs(whole, ranks=4, device="cpu")


def test_a_model_that_one_device_cannot_hold_is_climbed_shallow_and_then_whole():
    config, found = climbed("promote.layers=2", "parallel.stages=[1,3]")
    names = [rung.name for rung in found]
    assert names[4:6] == ["composed", "whole model"] and names[-1] == "whole model, restarted" and len(names) == 16
    assert [rung.name for rung in found if rung.timed] == ["whole model"]
    for rung in found:
        whole = rung.name.startswith("whole model")
        chosen, _ = planned(rung, "promote.layers=2", "parallel.stages=[1,3]")
        assert chosen.model.num_layers == (4 if whole else 2), rung.name
        assert (chosen.parallel == config.parallel) is whole
        assert rung.baseline == ("whole model" if whole else "one device")
    assert [rung.name for rung in climbed()[1] if rung.timed] == ["composed"]
