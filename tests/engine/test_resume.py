"""Which run and checkpoint a command goes on from: cases C5, D3 and two runs in one folder."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conf.load import to_plain
from conf.schema import Config
from engine.checkpoint_folder import FORMAT, checkpoint_path, write_manifest
from engine.resume import Start, choose_start
from tests.engine.cases import tiny_config


def config_of(folder: Path, **changes: Any) -> Config:
    config = tiny_config(**changes)
    config.run.dir = str(folder)
    config.resume = "auto"
    return config


def make_run(folder: Path, name: str, *steps: int, complete: bool = False, **changes: Any) -> Path:
    run = folder / "default" / name
    (run / "checkpoints").mkdir(parents=True)
    for step in steps:
        path = checkpoint_path(run / "checkpoints", step)
        path.mkdir()
        write_manifest(path, {"format": FORMAT, "config": to_plain(config_of(folder, **changes))})
    if complete:
        (run / "complete.json").write_text("{}")
    return run


def steps(start: Start) -> list[int]:
    return [int(path.name.rpartition("-")[2]) for path in start.candidates]


def test_auto_takes_the_newest_unfinished_run_of_this_model(tmp_path: Path) -> None:
    make_run(tmp_path, "20260101-a", 5)
    wanted = make_run(tmp_path, "20260102-b", 9, 10, 100)
    make_run(tmp_path, "20260103-c", 7, complete=True)
    make_run(tmp_path, "20260104-d", 7, model__num_layers=2)
    make_run(tmp_path, "20260105-e")
    (wanted / "failed.json").write_text("{}")
    (wanted / "checkpoints" / ".step-00000101.partial").mkdir()
    start = choose_start(config_of(tmp_path, train__train_iters=100), rank=0)
    assert start.path == wanted and steps(start) == [100, 10, 9] and not start.only
    assert not (wanted / "failed.json").exists()
    assert not list((wanted / "checkpoints").glob(".*"))


def test_auto_with_nothing_there_starts_a_new_run_and_says_so(tmp_path: Path) -> None:
    start = choose_start(config_of(tmp_path), rank=0)
    assert start.candidates == [] and start.path is not None and start.path.is_dir()
    assert "starting a new one" in start.note


def test_a_run_in_use_is_refused_by_name_and_auto_takes_another(tmp_path: Path) -> None:
    older, newer = make_run(tmp_path, "z", 5), make_run(tmp_path, "b", 6)
    first = choose_start(config_of(tmp_path), rank=0)
    assert first.path == newer
    with pytest.raises(ValueError, match=rf"b is in use by run b, process {os.getpid()} on "):
        choose_start(config_of(tmp_path, run__id="b"), rank=0)
    second = choose_start(config_of(tmp_path), rank=0)
    assert second.path == older


def test_never_refuses_the_folder_of_another_run(tmp_path: Path) -> None:
    make_run(tmp_path, "a", 5)
    config = config_of(tmp_path, run__id="a")
    config.resume = "never"
    with pytest.raises(ValueError, match=r"a is another run's .*resume=auto goes on with it"):
        choose_start(config, rank=0)


def test_a_complete_run_has_nothing_left_unless_it_shall_train_longer(tmp_path: Path) -> None:
    make_run(tmp_path, "a", 20, complete=True)
    assert choose_start(config_of(tmp_path, run__id="a"), rank=0).complete
    longer = choose_start(config_of(tmp_path, run__id="a", train__train_iters=30), rank=0)
    assert not longer.complete and steps(longer) == [20]


def test_a_run_that_stands_beyond_the_steps_asked_for_is_neither_taken_nor_closed(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", 10)
    fewer = dict(train__train_iters=9)
    assert choose_start(config_of(tmp_path, **fewer), rank=0).path != run
    with pytest.raises(ValueError, match=r"step-00000010 is beyond train\.train_iters=9; raise that"):
        choose_start(config_of(tmp_path, run__id="a", **fewer), rank=0)
    assert steps(choose_start(config_of(tmp_path, run__id="a"), rank=0)) == [10]
    earlier = make_run(tmp_path, "b", 5, 10) / "checkpoints" / "step-00000005"
    config = config_of(tmp_path, run__id="b", **fewer)
    config.resume = str(earlier)
    assert steps(choose_start(config, rank=0)) == [5]  # going back behind the newest is no fault


def test_a_path_starts_a_new_run_or_goes_on_in_its_own(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", 5, 6)
    config = config_of(tmp_path)
    for given, wanted, only in (
        (run / "checkpoints" / "step-00000005", [5], True),
        (run / "checkpoints", [6, 5], False),
        (run, [6, 5], False),
    ):
        config.resume = str(given)
        start = choose_start(config, rank=0)
        assert steps(start) == wanted and start.only is only
        assert start.path is not None and start.path != run
    config.run.id = "a"
    assert choose_start(config, rank=0).path == run


@pytest.mark.parametrize("given", ["/nope", "empty"])
def test_a_path_without_a_checkpoint_is_refused_and_nothing_is_written(given: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    config = config_of(tmp_path)
    config.resume = given if given.startswith("/") else str(tmp_path / given)
    with pytest.raises(ValueError, match="there is no complete checkpoint"):
        choose_start(config, rank=0)
    assert not (tmp_path / "default").exists()


def test_another_model_is_refused_with_every_difference(tmp_path: Path) -> None:
    make_run(tmp_path, "a", 5)
    config = config_of(tmp_path, run__id="a", model__num_layers=3, model__hidden_size=32)
    with pytest.raises(ValueError) as caught:
        choose_start(config, rank=0)
    assert "model.hidden_size is 32 here and 64 there" in str(caught.value)
    assert "model.num_layers is 3 here and 4 there" in str(caught.value)


def test_other_training_is_accepted_and_each_knob_is_named(tmp_path: Path) -> None:
    """Case C5: the command line rules; old and new value are said and recorded."""
    make_run(tmp_path, "a", 5)
    changes = {"train__lr": 0.5, "parallel__tp": 2, "model__hidden_dropout": 0.1, "telemetry__plot": False}
    start = choose_start(config_of(tmp_path, run__id="a", **changes), rank=0)
    assert start.changed == [("parallel.tp", 1, 2), ("train.lr", 1e-3, 0.5)]


def test_a_damaged_newest_manifest_does_not_hide_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", 5, 6)
    (run / "checkpoints" / "step-00000006" / "manifest.json").write_text("{")
    start = choose_start(config_of(tmp_path), rank=0)
    assert start.path == run and steps(start) == [6, 5]


def test_weights_that_are_not_there_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    config.initialize_from = str(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"initialize_from=.*holds no \.safetensors file"):
        choose_start(config, rank=0)


def test_weights_of_another_model_are_refused_before_anything_starts(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"model.norm.weight": np.ones(64, np.float32)}, tmp_path / "model.safetensors")
    config = config_of(tmp_path / "runs")
    config.initialize_from = str(tmp_path)
    with pytest.raises(ValueError, match=r"is another model: it has no tensor lm_head\.weight \(and \d+ more\)"):
        choose_start(config, rank=0)
    assert not (tmp_path / "runs").exists()


def test_a_run_that_was_started_from_a_path_goes_on_from_there(tmp_path: Path) -> None:
    """Restarted before its first own checkpoint: resume=auto with its id knows where it came from."""
    origin = make_run(tmp_path, "a", 5)
    config = config_of(tmp_path, run__id="b")
    config.resume = str(origin)
    first = choose_start(config, rank=0)
    assert first.lock is not None and first.path == tmp_path / "default" / "b"
    first.lock.close()
    config.resume = "auto"
    again = choose_start(config, rank=0)
    assert again.path == first.path and again.candidates == [origin / "checkpoints" / "step-00000005"]


def test_a_disk_without_room_for_a_checkpoint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case D4, before the first step."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=r"1\.0 kB free but one checkpoint takes 2\.2 MB"):
        choose_start(config_of(tmp_path), rank=0)
