"""launch/sweep.yaml: what wandb's agent makes of it is a command of ours, and every run it may draw is a plan."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from conf.cli import compose_config
from conf.knobs import is_known
from conf.load import range_problems
from parallel.plan import ParallelPlan
from tests.engine.launched import ROOT, finish
from tests.telemetry.wandb_files import stored

SWEEP = ROOT / "launch" / "sweep.yaml"


def sweep() -> dict[str, Any]:
    """As wandb reads it."""
    from wandb.sdk.launch.sweeps.utils import load_sweep_config

    config = load_sweep_config(str(SWEEP))
    assert config is not None
    return config


def agents_command(drawn: dict[str, Any]) -> list[str]:
    """What `wandb agent` runs for these values: its own functions, joined as wandb_agent.Agent._command_run does."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    config = sweep()
    parts = create_sweep_command_args({"args": {name: {"value": value} for name, value in drawn.items()}})
    parts["program"] = [config["program"]]
    command = []
    for word in create_sweep_command(list(config["command"])):
        command += parts[word[2:-1]] if word.startswith("${") and word.endswith("}") else [word]
    return command


def draws() -> list[dict[str, Any]]:
    """Every value of what is listed, with both ends and one between of what is drawn."""
    choices = []
    for name, one in sweep()["parameters"].items():
        values = one.get("values") or [one["min"], one["max"], math.sqrt(one["min"] * one["max"])]
        choices.append([(name, value) for value in values])
    return [dict(combination) for combination in itertools.product(*choices)]


def test_every_parameter_is_a_knob_and_every_plan_of_the_sweep_can_be_run():
    config = sweep()
    assert all(is_known(name) for name in config["parameters"])
    groups = {"parallel", "model", "train", "data"}
    assert not groups & config["parameters"].keys(), "would take the place of a group in the run's config"
    plans = set()
    for drawn in draws():
        command = agents_command(drawn)
        assert command[0] == "launch/local.sh" and (ROOT / command[0]).is_file()
        ranks, recipe, overrides = int(command[command.index("-n") + 1]), command[3], command[4:]
        assert (ROOT / recipe).is_file()
        composed = compose_config(overrides)
        assert range_problems(composed) == []
        plans.add(ParallelPlan.from_config(composed, ranks, device="cpu").label)
        assert composed.train.lr == drawn["train.lr"] and composed.resume == "never"
    assert len(plans) == len(config["parameters"]["parallel.tp"]["values"]) * len(
        config["parameters"]["parallel.pp"]["values"]
    )


def test_the_searched_metric_is_one_number_that_a_run_leaves():
    from telemetry.summary import Outcome

    assert sweep()["metric"]["name"] in Outcome().as_summary()


@pytest.mark.slow
def test_a_run_of_the_sweep_trains_under_the_agents_id_and_keeps_its_config(tmp_path: Path) -> None:
    """wandb's agent gives id, sweep and drawn values by environment and command line."""
    drawn = next(one for one in draws() if one["parallel.tp"] * one["parallel.pp"] == 2)
    values = tmp_path / "config.yaml"
    values.write_text(json.dumps({"wandb_version": 1, **{name: {"value": value} for name, value in drawn.items()}}))
    command = agents_command(drawn)
    command[0] = str(ROOT / command[0])
    small = ["telemetry.wandb.mode=offline", "model=llama_tiny", "data=stdlib", "train.train_iters=3", "run.id=r"]
    small += ["data.sequence_length=32", "train.eval_samples=8", "train.sample_tokens=0", "model.num_key_value_heads=4"]
    agent = {"WANDB_SWEEP_ID": "abcd1234", "WANDB_RUN_ID": "drawn1", "WANDB_SWEEP_PARAM_PATH": str(values)}
    code, output = finish([*command, *small], tmp_path, **agent)
    assert code == 0, output
    rows, config, run = stored(tmp_path / "runs" / "sweep" / "r")
    assert (run.run_id, run.sweep_id, run.job_type) == ("drawn1", "abcd1234", "sweep")
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3]
    assert (config["parallel"]["tp"], config["parallel"]["pp"]) == (drawn["parallel.tp"], drawn["parallel.pp"])
    assert config["train.lr"] == pytest.approx(drawn["train.lr"])
