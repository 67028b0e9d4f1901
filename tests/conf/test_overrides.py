"""Faults of the command line, in one process: each is one line that names what was meant."""

from __future__ import annotations

import shlex

import pytest

from conf.cli import compose_config, without_launcher_arguments
from conf.load import ConfigError


def faults(*arguments: str, config_dir=None) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        compose_config(arguments, config_dir=config_dir)
    assert all("\n" not in line for line in raised.value.problems)
    return list(raised.value.problems)


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("train.lrr=1", "train.lrr is not a knob; did you mean train.lr?"),
        ("+train.lrr=1", "train.lrr is not a knob; did you mean train.lr?"),
        ("++train.gloabl_batch_size=1", "train.gloabl_batch_size is not a knob; did you mean train.global_batch_size?"),
        ("~optimizer.wieght_decay", "optimizer.wieght_decay is not a knob; did you mean optimizer.weight_decay?"),
        ("lr=1", "lr is not a knob; did you mean train.lr?"),
        ("modle=llama_8b", "modle is not a knob; did you mean model?"),
        ("parallel.tpp=2", "parallel.tpp is not a knob; did you mean parallel.tp?"),
        ("telemetry.wandb.mod=online", "telemetry.wandb.mod is not a knob; did you mean telemetry.wandb.mode?"),
        ("data.sources.0.pth=x", "data.sources.0.pth is not a knob; did you mean data.sources.0.path?"),
        ("xyzzy=1", "xyzzy is not a knob"),
        ("train.lr=fast", "train.lr=fast: Value 'fast' of type 'str' could not be converted to Float (train.lr)"),
        (
            "train.train_iters=1.5",
            "train.train_iters=1.5: Value '1.5' of type 'float' could not be converted to Integer",
        ),
        (
            "parallel.schedule=gpipe",
            "parallel.schedule=gpipe: Invalid value 'gpipe', expected one of [1f1b, eager1f1b, dualpipev]",
        ),
        ("train.lr_unit=epochs", "train.lr_unit=epochs: Invalid value 'epochs', expected one of [steps, tokens]"),
        ("train.lr=null", "train.lr=null: field 'train.lr' is not Optional"),
        ("train=fast", "train=fast: Invalid type assigned: str is not a subclass of TrainConfig"),
        ("train.lr", "cannot read 'train.lr': it has no value; write key=value"),
        ("run.experiment=[a", "cannot read 'run.experiment=[a'"),
        ("parallel=tp2_p2", "parallel=tp2_p2 is not an option; did you mean tp2_pp2?"),
        ("experiment=stdlib", "experiment=stdlib is not an option; did you mean stdlib_tp2_pp2?"),
        ("+zero=stage2", "+zero: zero is chosen already; write zero=stage2 without the +"),
        ("+train.lr=1", "+train.lr=1: train.lr is there already; write train.lr=1 without the +"),
        ("+train.foo=1", "train.foo is not a knob"),
        ("~train.lr", "~train.lr: a knob cannot be taken away; leave it out for its default"),
        ("~train", "~train: a knob cannot be taken away"),
        ("~zero", "~zero: a group cannot be taken away; choose one of stage0, stage1"),
        ("data=text", "data.sources.0.path has no value; set data.sources.0.path=..."),
        ("model.name=???", "model.name has no value; set model.name=..."),
        ("run.experiment=${modl.name}", "Interpolation key 'modl.name' not found (run.experiment)"),
    ],
)
def test_a_fault_is_one_line_that_names_what_was_meant(typed, line):
    (found,) = faults(typed)
    assert found.startswith(line)


def test_all_faults_show_at_once():
    found = faults("train.lrr=1", "model=lama_8b", "train.lr=abc", "~zero.stge", "a=[")
    assert len(found) == 5


def test_the_options_of_a_group_are_listed():
    (line,) = faults("zero=stage4")
    assert line.endswith("zero: stage0, stage1, stage2, stage3")


def test_values_arrive_typed():
    config = compose_config(
        [
            "parallel.schedule=1f1b",
            "train.lr=3e-4",
            "parallel.stages=[1,3]",
            "data.sources.0.path=/x",
            "train.lr_decay=9",
        ]
    )
    assert config.parallel.schedule.value == "1f1b" and config.train.lr == 3e-4
    assert config.parallel.stages == [1, 3] and config.data.sources[0].path == "/x" and config.train.lr_decay == 9


def test_interpolations_are_resolved():
    config = compose_config(["run.experiment=${model.name}-${parallel.tp}", "model.name=tiny", "parallel.tp=2"])
    assert config.run.experiment == "tiny-2"  # case G3


def test_rotary_scaling_is_set_whole_or_by_key():
    whole = compose_config(["model.rope_scaling={rope_type: linear, factor: 2}"])
    assert whole.model.rope_scaling == {"rope_type": "linear", "factor": 2}
    assert compose_config(["model=llama_8b", "model.rope_scaling.factor=4"]).model.rope_scaling["factor"] == 4


def test_a_folder_of_own_yaml_files_is_searched(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrain:\n  lr: 0.5\n")
    assert compose_config(["experiment=mine"], config_dir=str(tmp_path)).train.lr == 0.5


def test_a_typo_inside_a_yaml_file_names_the_nearest_knob(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrain:\n  lrr: 0.5\n")
    (line,) = faults("experiment=mine", config_dir=str(tmp_path))
    assert "train.lrr is not a knob; did you mean train.lr?" in line


def test_a_broken_yaml_file_is_named(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("train: [\n")
    (line,) = faults("experiment=mine", config_dir=str(tmp_path))
    assert "mine.yaml" in line


def test_launcher_arguments_are_dropped_in_every_spelling():
    assert without_launcher_arguments(
        ["--local_rank=3", "a=1", "--local-rank=3", "--local_rank", "3", "b=2", "--local-rank", "3"]
    ) == ["a=1", "b=2"]


@pytest.mark.parametrize(
    ("typed", "quoted"),
    [
        ("telemetry.wandb.group=é", 'telemetry.wandb.group="é"'),
        ("telemetry.wandb.group=日本 語!", 'telemetry.wandb.group="日本 語!"'),
        ("telemetry.wandb.group=a;b", 'telemetry.wandb.group="a;b"'),
        ("telemetry.wandb.group=lr=3", 'telemetry.wandb.group="lr=3"'),
        ("telemetry.wandb.group=it's", 'telemetry.wandb.group="it\'s"'),
        ('telemetry.wandb.group=a"é\\', 'telemetry.wandb.group="a\\"é\\\\"'),
        ("telemetry.wandb.tags=[a b,é,'ü',x!]", 'telemetry.wandb.tags=[a b,"é",\'ü\',"x!"]'),
        ("data.sources=[{path: /d/é x.jsonl, weight: 2}]", 'data.sources=[{path: "/d/é x.jsonl", weight: 2}]'),
    ],
)
def test_a_value_with_a_sign_that_hydra_does_not_know_is_shown_in_quotes_and_taken_so(typed, quoted):
    (line,) = faults(typed)
    assert line.endswith(f"; put such text in quotes: {shlex.quote(quoted)}")
    config = compose_config([quoted])
    if "group" in typed:
        assert config.telemetry.wandb.group == typed.partition("=")[2]
    elif "tags" in typed:
        assert config.telemetry.wandb.tags == ["a b", "é", "ü", "x!"]
    else:
        assert config.data.sources[0].path == "/d/é x.jsonl"


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("run.nots=é", "run.nots is not a knob; did you mean"),
        ("train.lr=1;2", "train.lr=\"1;2\": Value '1;2' of type 'str' could not be converted to Float (train.lr)"),
        ("telemetry.wandb.group=a\nb", 'put such text in quotes, key="value"'),
        ("é=1", "write key=value"),
    ],
)
def test_where_quotes_would_not_do_what_is_wrong_besides_is_told(typed, line):
    assert line in faults(typed)[0]
