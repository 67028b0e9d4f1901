"""promote.run takes what recipes/benchmark.py wrote: of its contenders the one that the profile's plan is.

A benchmark's file is made here of a config and figures; the last test takes one that the recipe really wrote.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from conf.cli import compose_config
from conf.load import to_plain
from engine.promote import Promotion
from parallel.plan import ParallelPlan
from parallel.prediction import predict_run
from parallel.profile import read_record
from parallel.promotion import observations_of
from parallel.record import software
from tests.engine.launched import ROOT, finish

SETTING = ["model=llama_tiny", "cluster=epyc_zen2_2cores", "data.mask_documents=false", "data.sequence_length=64"]
LOSSES = [6.0, 5.9, 5.8]


@pytest.fixture
def promotion(tmp_path) -> Any:
    """A function that opens the promotion of a profile of two stages, cut as the planner would."""
    folder = tmp_path / "conf" / "parallel"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("# two stages\nname: mine\npp: 2\n")

    def opened(path: Path, *words: str) -> Promotion:
        given = ["parallel=mine", "zero=stage0", *SETTING, f"promote.run={path}", *words]
        config = compose_config(given, config_dir=str(tmp_path / "conf"))
        ranks = config.promote.ranks or 2
        return Promotion.open(
            config, ParallelPlan.from_config(config, ranks, device="cpu"), given, config_dir=str(tmp_path / "conf")
        )

    return opened


def written(path: Path, *words: str, **contenders: dict[str, Any]) -> Path:
    """A benchmark's file; contenders: name -> its losses, step times and ranks where they are not the usual ones."""
    rows, steps = [], {}
    for key, values in contenders.items():
        name = key.replace("__", " ")
        ranks = values.get("ranks", 1)
        rows.append({"name": name, "ranks": ranks})
        steps[name] = {
            "step_times_s": values.get("step_times_s", [0.5, 9.0, 0.4]), "cpu_s": 1.0,
            "losses": values.get("losses", LOSSES), "peak_bytes": [700_000_000] * ranks, "memory_limit": 2_000_000_000,
        }  # fmt: skip
    config = to_plain(compose_config([*SETTING, *words]))
    kept = {
        "git_commit": "abc", "software": software(), "device": "a CPU", "device_kind": "cpu", "config": config,
        "contenders": rows, "steps": steps,
    }  # fmt: skip
    path.write_text(json.dumps(kept))
    return path


def kinds(observation: dict[str, Any]) -> list[str]:
    return [failure["kind"] for failure in observation["failures"]]


def test_the_contender_of_the_profiles_plan_is_filled_in_beside_what_runs_are_predicted(promotion, tmp_path):
    path = written(
        tmp_path / "b.json", ours__tp1={}, ours__pp2_zero1={"ranks": 2, "step_times_s": [7.0]}, ours__pp2={"ranks": 2}
    )
    opened = promotion(path)
    observation = opened.filled_in()
    assert (observation["kind"], observation["baseline"]) == ("benchmark", "ours tp1")
    assert observation["measured"]["contender"] == "ours pp2" and observation["step_s"] == 0.5
    predicted = predict_run(opened.config, opened.plan, device="cpu").step_s
    assert observation["predicted_step_s"] == pytest.approx(predicted)
    assert "no corpus" in observation["tokens"] and observation["software"] == software()
    assert "ladder" in kinds(observation) and "parity" not in kinds(observation)
    assert read_record("mine", tmp_path / "conf" / "parallel")["observations"] == [json.loads(json.dumps(observation))]


def test_it_promotes_where_a_ladder_was_climbed_under_its_conditions_and_nowhere_else(promotion, tmp_path):
    path = written(tmp_path / "b.json", ours__tp1={}, ours__pp2={"ranks": 2})
    opened = promotion(path, "promote.tolerance=1e9")
    first = opened.filled_in()
    assert kinds(first) == ["ladder"]
    opened.record["observations"].append({**first, "kind": "ladder", "promoted": True})
    assert opened.filled_in()["promoted"]
    longer = written(tmp_path / "long.json", "data.sequence_length=32", ours__tp1={}, ours__pp2={"ranks": 2})
    again = promotion(longer, "promote.tolerance=1e9")
    again.record["observations"] = opened.record["observations"]
    other = again.filled_in()
    assert kinds(other) == ["ladder"] and observations_of(opened.record, other) == [other]


def test_it_is_compared_with_the_one_device_contender_of_its_own_file(promotion, tmp_path):
    off = {"ranks": 2, "losses": [6.0, 5.901, 5.8]}
    observation = promotion(written(tmp_path / "ours.json", ours__tp1={}, ours__pp2=off)).filled_in()
    assert "the loss of step 2 is 5.901 and the baseline's 5.9" in str(observation["failures"])
    observation = promotion(written(tmp_path / "peer.json", torch__loop={}, ours__pp2=off)).filled_in()
    assert "parity" in kinds(observation) and observation["baseline"] == "torch loop"
    observation = promotion(written(tmp_path / "none.json", ours__pp2=off)).filled_in()
    assert "parity" not in kinds(observation) and observation["baseline"] is None


def test_memory_of_each_rank_is_held_against_the_limit(promotion, tmp_path):
    path = written(tmp_path / "b.json", ours__pp2={"ranks": 2})
    observation = promotion(path, "promote.memory_limit=6e8").filled_in()
    assert "memory" in kinds(observation) and "over the 0.600 GB of a device" in str(observation["failures"])
    assert "memory" not in kinds(promotion(path).filled_in())


def test_a_benchmark_that_cannot_be_filled_in_is_one_line_that_names_what_was_measured(promotion, tmp_path):
    path = written(tmp_path / "b.json", ours__tp1={}, ours__tp2={"ranks": 2}, ours__pp2_zero1={"ranks": 2})
    with pytest.raises(ValueError, match="measured tp1, tp2, pp2_zero1; none is this profile on 2 ranks with ZeRO"):
        promotion(path).filled_in()
    with pytest.raises(ValueError, match="trained on a corpus"):
        promotion(path, "promote.baseline=runs/default/x").filled_in()
    old = json.loads(path.read_text())
    del old["software"]
    path.write_text(json.dumps(old))
    with pytest.raises(ValueError, match=r"of an older recipes/benchmark.py.*measure again"):
        promotion(path).filled_in()
    for text in ("{", "[]", '{"loss": 1}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"none that recipes/benchmark.py wrote"):
            promotion(path).filled_in()


@pytest.mark.slow
def test_what_the_recipe_really_writes_is_filled_in(tmp_path):
    sizes = ["vocab_size=64", "hidden_size=32", "num_layers=2", "num_attention_heads=2", "ffn_hidden_size=64"]
    setting = [
        "cluster=epyc_zen2_2cores", "model=llama_tiny", "data.sequence_length=16", *(f"model.{size}" for size in sizes)
    ]  # fmt: skip
    measured = [
        "benchmark.plans=[tp1,pp2]", "benchmark.peers=false", "benchmark.checkpoints=false", "benchmark.steps=2",
        "benchmark.rounds=2", "benchmark.cores=2", "run.id=here",
    ]  # fmt: skip
    code, output = finish([sys.executable, str(ROOT / "recipes/benchmark.py"), *setting, *measured], tmp_path)
    assert code == 0, output
    (tmp_path / "output.txt").unlink()
    (tmp_path / "conf" / "parallel").mkdir(parents=True)
    (tmp_path / "conf" / "parallel" / "mine.yaml").write_text("# two stages\nname: mine\npp: 2\n")
    promote = [sys.executable, str(ROOT / "recipes/promote.py"), "--config-dir", str(tmp_path / "conf")]
    words = ["profile=mine", "zero=stage0", *setting, "promote.run=runs/benchmark/here.json", "promote.tolerance=1e9"]
    code, output = finish([*promote, *words], tmp_path)
    assert code == 1 and "benchmark: ladder: no ladder was climbed" in output, output
    [observation] = read_record("mine", tmp_path / "conf" / "parallel")["observations"]
    assert kinds(observation) == ["ladder"], "losses are those of one device, memory is below the limit"
    assert len(observation["measured"]["peak_bytes"]) == 2 and observation["predicted_step_s"] > 0
    assert observation["conditions"]["cluster"]["ranks"] == 2 and len(observation["measured"]["losses"]) == 6
