"""Range checks, the plain form and the fingerprint."""

from __future__ import annotations

import dataclasses
import json

import pytest
from omegaconf import OmegaConf

from conf.cli import compose_config
from conf.knobs import knobs
from conf.load import RANGES, ConfigError, fingerprint, from_plain, load, range_problems, to_plain
from conf.schema import Config


def config(**changes) -> Config:
    made = Config()
    made.model.name = "x"
    for key, value in changes.items():
        group, _, name = key.partition("__")
        setattr(getattr(made, group), name, value)
    return made


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"train__micro_batch_size": 0}, "train.micro_batch_size=0 must be positive"),
        ({"train__lr": -1.0}, "train.lr=-1 must be positive"),
        ({"train__lr": float("nan")}, "train.lr=nan is not a finite number"),
        ({"train__lr": float("inf")}, "train.lr=inf is not a finite number"),
        ({"zero__stage": 4}, "zero.stage=4 must be 0, 1, 2 or 3"),
        ({"model__hidden_dropout": 1.0}, "model.hidden_dropout=1 must be at least 0 and below 1"),
        ({"optimizer__clip_grad": -0.5}, "optimizer.clip_grad=-0.5 must be 0 or more"),
        ({"train__min_lr_ratio": 1.5}, "train.min_lr_ratio=1.5 must be from 0 to 1"),
        ({"parallel__tp": 0}, "parallel.tp=0 must be positive"),
        ({"data__sources": []}, "data.sources=[] names no corpus; give at least one source"),
    ],
)
def test_a_number_out_of_its_range_is_named(changes, line):
    assert range_problems(config(**changes)) == [line]


def test_all_numbers_out_of_range_are_named_at_once():
    assert len(range_problems(config(train__lr=0.0, parallel__pp=-1, zero__stage=9))) == 3


def test_loading_raises_with_every_problem():
    with pytest.raises(ConfigError) as raised:
        load(OmegaConf.structured(config(train__lr=0.0, parallel__pp=-1)))
    assert len(raised.value.problems) == 2
    with pytest.raises(ConfigError, match=r"model\.name has no value"):
        load(OmegaConf.structured(Config()))


def test_every_range_is_about_a_knob_that_exists():
    items = {"data.sources.weight", "data.sources.max_documents", "data.sources.eod_id"}
    ranged = {key for keys in RANGES.values() for key in keys.split()}
    assert ranged - {knob.key for knob in knobs()} == items


def test_every_number_has_a_range():
    ranged = {key for keys in RANGES.values() for key in keys.split()}
    numbers = {knob.key for knob in knobs() if knob.kind.split(" ")[0] in ("int", "float")}
    assert numbers <= ranged


def test_the_default_config_survives_the_way_through_omegaconf():
    assert load(OmegaConf.structured(config())) == config()


def test_the_plain_form_is_json_without_loss():
    plain = to_plain(config())
    assert json.loads(json.dumps(plain)) == plain
    assert plain["parallel"]["schedule"] == "1f1b" and set(plain) == {f.name for f in dataclasses.fields(Config)}


def test_the_plain_form_comes_back_as_the_config_it_was():
    written = config()
    assert from_plain(to_plain(written)) == written


def test_the_fingerprint_follows_what_is_computed_and_not_where_it_is_written():
    base = fingerprint(config())
    assert fingerprint(config(run__dir="elsewhere", telemetry__log_interval=7)) == base
    assert fingerprint(config(train__lr=1e-4)) != base
    assert len(base) == 64


def test_every_knob_has_a_sentence():
    assert [knob.key for knob in knobs() if not knob.sentence] == []


@pytest.mark.parametrize("stages", ["profiled", "[1, two]", "[1.5, 2]", "3", "true", "{a: 1}"])
def test_stages_are_null_profile_or_whole_numbers(stages):
    with pytest.raises(ConfigError, match=r"parallel\.stages=.* use null, profile, or a list such as \[3,5\]"):
        compose_config([f"parallel.stages={stages}"])
    assert compose_config(["parallel.stages=profile"]).parallel.stages == "profile"
    assert compose_config(["parallel.stages=null"]).parallel.stages is None
