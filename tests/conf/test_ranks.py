"""How many ranks launch/local.sh starts, and the smaller plan where GPUs are few."""

from __future__ import annotations

import pytest

from conf.cli import compose_config
from conf.load import ConfigError
from conf.ranks import choose, composed, require_plan

MAIN = ["experiment=stdlib_tp2_pp2"]


@pytest.mark.parametrize(
    ("device", "devices", "chosen"),
    [
        ("cpu", 0, (4, [])),
        ("cuda", 4, (4, [])),
        ("cuda", 7, (4, [])),
        ("cuda", 8, (8, [])),
        ("cuda", 2, (2, ["parallel=tp2"])),
        ("cuda", 3, (2, ["parallel=tp2"])),
        ("cuda", 1, (1, ["parallel=tp1"])),
    ],
)
def test_the_main_job_runs_on_what_the_machine_allows(device, devices, chosen):
    assert choose(MAIN, device=device, devices=devices) == chosen


def test_a_plan_that_was_asked_for_is_not_changed():
    with pytest.raises(ConfigError, match="= 4 ranks but this machine has 2 GPUs"):
        choose(["parallel=tp2_pp2"], device="cuda", devices=2)


def test_a_recipe_without_training_needs_weights_and_a_plan_of_tp_and_pp_alone(tmp_path):
    with pytest.raises(ConfigError, match="initialize_from=gone: "):
        composed("evaluate.py", ["initialize_from=gone"])
    with pytest.raises(ConfigError, match="initialize_from has no value; name the weights"):
        composed("generate.py", ["model=llama_tiny"])
    words = ["model=llama_tiny", "parallel.tp=2", "parallel.sequence_parallel=true", "train.global_batch_size=3"]
    config = compose_config(words)
    require_plan("evaluate.py", config, world_size=4, device="cpu")
    for recipe, ranks in (("pretrain.py", 4), ("evaluate.py", 3)):
        with pytest.raises(ConfigError):
            require_plan(recipe, config, world_size=ranks, device="cpu")
    require_plan("plan.py", config, world_size=3, device="cpu")
