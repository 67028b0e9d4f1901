"""The ladder is climbed rung by rung, each judged as it ends; what fails is named by its class and ends the climb.

The runs are written by a stand-in for the launcher, as recipes/pretrain.py would leave them; below is a test of the
launcher, and a real climb.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from conf.cli import compose_config
from engine import ladder as module
from engine.failure import EXIT_FAILED
from engine.ladder import TIMED_OUT, as_kept, as_rows, launched, read_run
from engine.promote import Promotion
from parallel.plan import ParallelPlan
from parallel.profile import read_record
from tests.engine.launched import ROOT, finish

pytestmark = pytest.mark.alone

NAMES = ["one device", "tp alone", "pp alone", "dp alone with ZeRO 1", "composed"]


def written(folder: Path, losses: dict[int, float], **prediction: Any) -> None:
    """A run's folder as it is left behind."""
    folder.mkdir(parents=True)
    rows = [{"step": s, "train/loss": loss, "train/mfu_of_measured_rate": 0.1} for s, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "step_s": {"predicted": 1.0, "measured": 1.1}, "mfu": {"predicted": None, "measured": None},
        "peak_bytes": [5, 7], "memory_limit": 10, "stages": [], "device": "a CPU",
        **prediction,
    }  # fmt: skip
    (folder / "prediction.json").write_text(json.dumps(values))


class Runs:
    """In place of the launcher: every run passes, but for what `faults` do to a rung's."""

    def __init__(self, **faults: Any) -> None:
        self.faults = {name.replace("_", " "): fault for name, fault in faults.items()}
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], output: Path, *, timeout_s: float) -> int:
        self.commands.append(command)
        words = dict(word.split("=", 1) for word in command if "=" in word)
        folder, resume = output.with_suffix(""), words["resume"]
        rung = folder.name.split("-", 3)[-1].replace("_", " ")
        first = 1 if resume == "never" else 5
        assert resume == "never" or Path(resume).parents[1].is_dir()
        losses = {step: 6.0 - 0.1 * step for step in range(first, 9)}
        fault = self.faults.get(rung)
        if callable(fault):
            return fault(folder, losses)
        written(folder, losses, **(fault or {}))
        return 0


@pytest.fixture
def promotion(tmp_path, monkeypatch) -> Any:
    """A function that opens the promotion of tp2_pp2 in a folder of profiles of the test's own."""
    profiles = tmp_path / "conf"
    (profiles / "parallel").mkdir(parents=True)
    (profiles / "parallel" / "mine.yaml").write_text("# four ranks\nname: mine\ntp: 2\npp: 2\n")

    monkeypatch.chdir(tmp_path)

    def opened(runs: Any, *words: str) -> Promotion:
        monkeypatch.setattr(module, "launched", runs)
        given = ["parallel=mine", "model=llama_tiny", f"run.dir={tmp_path / 'runs'}", *words]
        config = compose_config(given, config_dir=str(profiles))
        plan = ParallelPlan.from_config(config, 4, device="cpu")
        return Promotion.open(config, plan, given, config_dir=str(profiles))

    return opened


def failed(error: str, code: int = EXIT_FAILED) -> Any:
    """A run that ended early."""

    def run(folder: Path, losses: dict[int, float]) -> int:
        folder.mkdir(parents=True)
        (folder / "failed.json").write_text(json.dumps({"error": error}))
        return code

    return run


def says(line: str, code: int) -> Any:
    """A run that ended before it had a folder."""

    def run(folder: Path, losses: dict[int, float]) -> int:
        folder.with_suffix(".txt").write_text(f"a banner\n{line}\nthe launcher's last words\n")
        return code

    return run


def draws(**changes: Any) -> Any:
    """A run whose losses are others."""

    def run(folder: Path, losses: dict[int, float]) -> int:
        written(folder, losses | changes.get("losses", {}))
        return 0

    return run


def test_a_whole_climb_promotes_and_keeps_every_rung_beside_its_baseline(promotion, tmp_path):
    runs = Runs()
    opened = promotion(runs)
    observation = opened.climbed()
    assert observation["promoted"] and observation["failures"] == []
    assert [row["rung"] for row in observation["rungs"]][:5] == NAMES and len(observation["rungs"]) == 14
    assert [row["ranks"] for row in observation["rungs"]][:5] == [1, 2, 2, 2, 4]
    rows = json.dumps(observation["rungs"])
    assert str(tmp_path) not in rows and str(ROOT) not in rows, "a record is read on other machines too"
    assert observation["baseline"] == "one device" and observation["step_s"] == 1.1
    record = read_record("mine", tmp_path / "conf" / "parallel")
    assert record["observations"] == [json.loads(json.dumps(observation))]
    assert record["status"] == "promoted for llama_tiny on 4 ranks of local (a CPU)"
    assert "promoted: mine version 1" in opened.verdict(observation)


def test_restarts_go_on_from_the_checkpoint_of_their_rung(promotion):
    runs = Runs()
    promotion(runs).climbed()
    resumed = [word for command in runs.commands for word in command if word.startswith("resume=/")]
    assert len(resumed) == 9 and all(word.endswith("/checkpoints/step-00000004") for word in resumed)
    assert sum("one_device" in word for word in resumed) == 2, "under the same plan, and composed"


CLASSES = {
    "parity": (dict(tp_alone=draws(losses={3: 5.71})), "tp alone", "the loss of step 3 is 5.71 and the baseline's 5.7"),
    "not finite": (dict(one_device=draws(losses={2: math.nan})), "one device", "the loss of step 2 is nan"),
    "diverged": (dict(pp_alone=failed("NonFiniteError('too many')")), "pp alone", "NonFiniteError"),
    "memory": (dict(composed={"peak_bytes": [5, 11]}), "composed", "rank 1 held"),
    "out of memory": (dict(composed=failed("OutOfMemoryError('CUDA out of memory.')")), "composed", "out of memory"),
    "time": (dict(composed={"step_s": {"predicted": 1.0, "measured": 1.3}}), "composed", "1.30 x the 1 s predicted"),
    "no prediction": (dict(composed={"step_s": {"predicted": None, "measured": 1}}), "composed", "recipes/probe.py"),
    "hang": (dict(pp_alone=failed("no progress for 60 s in step 3: rank 1")), "pp alone", "no progress for 60 s"),
    "timeout": (dict(pp_alone=failed("", TIMED_OUT)), "pp alone", "promote.timeout_s=900"),
    "crash": (dict(tp_alone=failed("RuntimeError('bad')")), "tp alone", "RuntimeError('bad') (its output: "),
    "refused": (dict(tp_alone=says("error: model.x is no knob", 2)), "tp alone", "exit code 2: error: model.x is no"),
    "restart": (
        {"pp_alone_restarted": draws(losses={7: 5.0})}, "pp alone, restarted", "the loss of step 7 is 5 and"
    ),
    "restart that crashed": (
        {"composed_restarted": failed("DamagedError('x')")}, "composed, restarted", "DamagedError('x')"
    ),
    "restart that trained nothing": (
        {"composed_restarted": draws(losses={5: 5.5, 9: 5.1})}, "composed, restarted",
        "it trained steps [5, 6, 7, 8, 9]",
    ),
}  # fmt: skip
KIND = {
    "not finite": "parity", "diverged": "parity", "out of memory": "memory", "no prediction": "time", "timeout": "hang",
    "refused": "crash", "restart that crashed": "restart", "restart that trained nothing": "restart",
}  # fmt: skip


@pytest.mark.parametrize("case", CLASSES)
def test_a_failure_is_named_by_its_class_and_ends_the_climb(case, promotion, tmp_path):
    faults, rung, words = CLASSES[case]
    opened = promotion(Runs(**faults))
    observation = opened.climbed()
    assert not observation["promoted"]
    [failure] = observation["failures"]
    assert (failure["rung"], failure["kind"]) == (rung, KIND.get(case, case)) and words in failure["line"]
    assert observation["rungs"][-1]["rung"] == rung, "nothing runs after it"
    record = read_record("mine", tmp_path / "conf" / "parallel")
    assert record["status"] == "predicted only" and record["observations"][-1]["failures"] == [failure]
    assert f"    {rung}: {failure['kind']}: " in opened.verdict(observation)


def test_a_slower_profile_than_predicted_is_promoted_where_it_beats_what_it_replaces(promotion, tmp_path):
    opened = promotion(Runs())
    opened.climbed()
    record = read_record("mine", tmp_path / "conf" / "parallel")
    again = record | {"replaces": {"observations": record["observations"]}, "observations": []}
    (tmp_path / "conf/parallel/records/mine.json").write_text(json.dumps(again))
    slow = {"step_s": {"predicted": 0.5, "measured": 1.05}}
    assert promotion(Runs(composed=slow)).climbed()["promoted"], "1.05 s is below the 1.1 s before"


def test_rungs_that_passed_are_left_out_only_where_asked_and_up_to_the_first_that_failed(promotion):
    first = Runs(pp_alone=failed("RuntimeError('bad')"))
    promotion(first).climbed()
    again = Runs()
    promotion(again, "promote.reuse=true").climbed()
    assert (len(first.commands), len(again.commands)) == (3, 12)
    starts = [word for command in again.commands for word in command if word.startswith("resume=/")]
    assert len({Path(word[7:]).parents[1].name[:20] for word in starts}) == 2, "checkpoints of both climbs"
    anew = Runs()
    promotion(anew).climbed()
    assert len(anew.commands) == 14
    other = Runs()
    promotion(other, "promote.reuse=true", "data.sequence_length=128").climbed()
    assert len(other.commands) == 14, "under other conditions nothing was climbed"


def finished(folder: Path, promotion: Any, **changes: Any) -> Path:
    opened = promotion(Runs())
    about = {
        "profile": opened.record["profile"], "conditions": opened.record["conditions"],
        "software": opened.record["planner"]["software"], "device": "a CPU",
    }  # fmt: skip
    written(folder, {step: 6.0 - 0.1 * step for step in range(1, 100)}, **(about | changes))
    (folder / "complete.json").write_text("{}")
    return folder


def test_a_finished_run_is_filled_in_and_promotes_where_the_ladder_was_climbed(promotion, tmp_path):
    run = finished(tmp_path / "run", promotion)
    observation = promotion(Runs(), f"promote.run={run}").filled_in()
    assert [one["kind"] for one in observation["failures"]] == ["ladder"] and observation["step_s"] == 1.1
    promotion(Runs()).climbed()
    observation = promotion(Runs(), f"promote.run={run}").filled_in()
    assert observation["promoted"] and observation["measured"]["peak_bytes"] == [5, 7]
    slow = finished(tmp_path / "slow", promotion, step_s={"predicted": 1.0, "measured": 2.0})
    observation = promotion(Runs(), f"promote.run={slow}").filled_in()
    assert [one["kind"] for one in observation["failures"]] == ["time"]


def test_a_run_that_cannot_be_filled_in_is_one_line(promotion, tmp_path):
    with pytest.raises(ValueError, match="no run that finished"):
        promotion(Runs(), f"promote.run={tmp_path}").filled_in()
    other = finished(tmp_path / "other", promotion, profile={"name": "tp4", "hash": "x"})
    with pytest.raises(ValueError, match="ran profile tp4 with other knobs"):
        promotion(Runs(), f"promote.run={other}").filled_in()


def test_a_profile_changed_on_the_command_line_is_not_climbed(promotion):
    promotion(Runs(one_device=failed("x"))).climbed()
    with pytest.raises(ValueError, match=r"leave parallel.. to the profile"):
        promotion(Runs(), "parallel.recompute=full")


def test_too_few_devices_are_one_line(promotion, monkeypatch):
    monkeypatch.setattr("engine.promote.RANKS_PER_CORE", 0)
    with pytest.raises(ValueError, match="profile mine needs 4 ranks but this machine carries at most 0"):
        promotion(Runs()).climbed()


def test_what_is_kept_in_a_record_comes_back_as_it_was(promotion):
    opened = promotion(Runs())
    results = opened.ladder.climb(opened.rungs, kept={}, say=lambda line: None)
    rows = json.loads(json.dumps(as_rows(results, opened.rungs)))
    kept = as_kept({"rungs": rows}, opened.ladder, opened.rungs)
    assert list(kept) == [rung.name for rung in opened.rungs]
    assert kept["one device"].losses == results[0].losses and kept["one device"].reused


def test_a_step_that_was_trained_twice_counts_as_it_was_last(tmp_path):
    written(tmp_path / "run", {1: 5.0, 2: 4.0})
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "train/loss": 3.0, "train/mfu_of_measured_rate": 0.2}\n{"step": 3, "train/lo')
    assert read_run(tmp_path / "run").losses == {1: 5.0, 2: 3.0}


def test_a_launcher_that_does_not_end_is_ended_with_all_that_it_started(tmp_path):
    (tmp_path / "recipe.py").write_text("import time\ntime.sleep(300)\n")
    command = [str(ROOT / "launch" / "local.sh"), "-n", "1", str(tmp_path / "recipe.py")]
    start = time.monotonic()
    assert launched(command, tmp_path / "output.txt", timeout_s=8) == TIMED_OUT
    assert time.monotonic() - start < 60
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]


def test_the_exit_code_and_the_output_are_the_commands(tmp_path):
    assert launched([sys.executable, "-c", "print(7); exit(3)"], tmp_path / "o.txt", timeout_s=30) == 3
    assert (tmp_path / "o.txt").read_text() == "7\n"


def test_a_rungs_command_is_one_that_composes(promotion, tmp_path):
    opened = promotion(Runs())
    chosen = [rung for rung in opened.rungs if rung.name in ("pp alone", "composed", "tp alone, restarted composed")]
    assert len(chosen) == 3
    for rung in chosen:
        command = opened.ladder.command(rung)
        words = command[command.index(str(ROOT / "recipes" / "pretrain.py")) + 3 :]
        config = compose_config(words, config_dir=str(tmp_path / "conf"))
        assert ParallelPlan.from_config(config, rung.ranks, device="cpu").world_size == rung.ranks
        assert (config.train.train_iters, config.checkpoint.interval) == (8, 4)


def test_the_recipe_prints_its_rungs_and_says_what_is_missing_in_one_line(tmp_path):
    promote = [sys.executable, str(ROOT / "recipes" / "promote.py")]
    code, output = finish([*promote, "profile=tp2_pp2", "model=llama_tiny", "promote.dry_run=true"], tmp_path)
    assert code == 0 and output.startswith("14 rungs:") and output.count("launch/local.sh -n") == 14
    (tmp_path / "output.txt").unlink()
    large = ["profile=tp8_pp8", "model=gpt3_175b", "train.global_batch_size=64", "zero=stage1", "precision=bf16"]
    code, output = finish([*promote, *large], tmp_path)
    assert (code, output.count("\n")) == (2, 1) and "profile tp8_pp8 needs 64 ranks but this machine" in output
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_two_ranks_really_climb_and_are_promoted_on_this_machine(tmp_path):
    """The cluster's rates are of no machine: the tolerance is wide, as what is judged here is the way, not the time."""
    profiles = tmp_path / "conf" / "parallel"
    profiles.mkdir(parents=True)
    (profiles / "mine.yaml").write_text("# two stages\nname: mine\npp: 2\n")
    given = [
        "profile=mine", "model=llama_tiny", "data.sequence_length=32", "promote.tolerance=50",
        "cluster.intra_node={bandwidth: 5e8, latency_s: 2e-4}",
        "cluster.rates={matrix_flops: 2e10, operand_bandwidth: 5e9, attention_flops: 1e10, memory_bandwidth: 5e9, "
        "kernel_s: 1e-5}",
    ]  # fmt: skip
    command = [sys.executable, str(ROOT / "recipes" / "promote.py"), "--config-dir", str(tmp_path / "conf"), *given]
    code, output = finish(command, tmp_path, timeout=900)
    assert code == 0 and "promoted: mine version 1" in output, output
    observation = read_record("mine", profiles)["observations"][-1]
    assert observation["promoted"] and len(observation["rungs"]) == 11
    baseline, *_ = rows = observation["rungs"]
    for row in rows:
        losses = {step: loss for step, loss in row["losses"].items() if step in baseline["losses"]}
        assert losses == pytest.approx({step: baseline["losses"][step] for step in losses}, rel=1e-5)
        assert len(losses) == (4 if "restarted" in row["rung"] else 8)
    [composed] = [row for row in rows if row["rung"] == "composed"]
    assert composed["communication_s"]["pipe"] > 0 and composed["mfu_of_measured_rate"] > 0
    assert max(composed["peak_bytes"]) < composed["memory_limit"]
    again = finish([*command, "promote.reuse=true"], tmp_path, timeout=60)
    assert again[0] == 0 and again[1].count("reused") == 11
