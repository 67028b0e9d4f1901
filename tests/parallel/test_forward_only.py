"""What only training has may neither refuse nor change a plan for forward passes."""

from __future__ import annotations

from conf.schema import Config, ModelConfig, Recompute, Schedule
from parallel.forward_only import forward_only
from parallel.plan import ParallelPlan
from parallel.rules import problems


def test_knobs_of_training_refuse_no_forward_pass() -> None:
    config = Config(model=ModelConfig(name="m", num_layers=4))
    config.parallel.tp = config.parallel.pp = 2
    plain = forward_only(config, world_size=12)
    config.parallel.sequence_parallel, config.parallel.schedule = True, Schedule.dualpipev
    config.parallel.recompute, config.parallel.recompute_interval = Recompute.full, 3
    config.parallel.stages = "profile"
    config.zero.stage, config.train.batch_ramp_up = 3, [7, 3, 1]
    assert len(problems(config, world_size=12, device="cpu")) >= 4  # ZeRO 3, the ramp, ...
    assert problems(forward_only(config, world_size=12), world_size=12, device="cpu") == []
    assert forward_only(config, world_size=12) == plain
    plan = ParallelPlan.from_config(plain, 12, device="cpu")
    assert (plan.data_parallel_size, len(plan.stage_layers), plan.sequence_parallel) == (3, 2, False)


def test_what_a_forward_pass_needs_is_still_refused() -> None:
    config = Config(model=ModelConfig(name="m", num_layers=2))
    config.parallel.tp, config.parallel.pp = 3, 4
    found = "\n".join(problems(forward_only(config, world_size=12), world_size=12, device="cpu"))
    assert "parallel.tp=3 does not divide model.num_attention_heads=4" in found
    assert "model.num_layers=2 is less than the 4 stages" in found
