"""Alert rules from YAML and the command line: changed, added, switched off; a bad one is refused with one line."""

from __future__ import annotations

import re

import pytest

from conf.cli import compose_config
from conf.knobs import CONF, is_known, options, rule_knobs
from conf.load import ConfigError, fingerprint, range_problems
from conf.schema import AlertAction, AlertRule, AlertSlice, NormalRange, Persistence

MINE = "alerts.mine={metric: train/loss, owner: me, mitigation: wait"


def problems(*arguments: str) -> list[str]:
    try:
        return range_problems(compose_config(arguments))
    except ConfigError as error:
        return list(error.problems)


def test_one_field_of_one_rule_changes_and_the_others_stay():
    shipped, changed = compose_config([]).alerts, compose_config(["alerts.mfu.normal.min=0.7"]).alerts
    assert changed["mfu"].normal.min == 0.7 and shipped["mfu"].normal.min == 0.8
    changed["mfu"].normal.min = 0.8
    assert changed == shipped


def test_rules_are_switched_off_chosen_and_added():
    every = set(compose_config([]).alerts)
    assert set(compose_config(["~alerts.straggler"]).alerts) == every - {"straggler"}
    assert set(compose_config(["alerts.straggler=null"]).alerts) == every - {"straggler"}
    assert compose_config(["alerts=none"]).alerts == {}
    assert set(compose_config(["alerts=[mfu,non_finite]"]).alerts) == {"mfu", "non_finite", "skipped_steps"}
    added = compose_config(["alerts=none", f"{MINE}, normal: {{max: 5}}, persistence: {{n: 2, m: 4}}, action: stop}}"])
    assert added.alerts == {
        "mine": AlertRule(
            "train/loss", "me", "wait", normal=NormalRange(max=5.0), persistence=Persistence(2, 4),
            action=AlertAction.stop,
        )
    }  # fmt: skip
    assert range_problems(added) == []


def test_a_rule_of_an_own_folder_stands_beside_the_shipped_ones(tmp_path):
    (tmp_path / "alerts").mkdir()
    text = "mine:\n  metric: train/hfu\n  owner: me\n  mitigation: wait\n  normal: {min: 0.2}\n  slice: plan\n"
    (tmp_path / "alerts" / "mine.yaml").write_text(text)
    config = compose_config(["alerts=[default,mine]"], config_dir=str(tmp_path))
    assert set(config.alerts) == {*compose_config([]).alerts, "mine"} and range_problems(config) == []
    assert config.alerts["mine"].slice is AlertSlice.plan


def test_alerts_determine_no_number_of_a_run():
    assert fingerprint(compose_config([])) == fingerprint(compose_config(["alerts=none"]))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["alerts.mfu.nromal.min=1"], "alerts.mfu.nromal is no field of an alert rule; did you mean normal?; metric"),
        (["alerts.mfu.normal.mni=1"], "alerts.mfu.normal.mni is no field of an alert rule; did you mean min?; min"),
        (["alerts.mfuu.normal.min=1"], "alerts.mfuu is not a rule; did you mean alerts.mfu? a new one needs metric"),
        (["alerts.mine.metric=train/loss"], "alerts.mine has no owner and no mitigation; set alerts.mine.owner=..."),
        (["alerts.mfu.mitigation=''"], "alerts.mfu has no mitigation; set alerts.mfu.mitigation=..."),
        (["alerts.mfu=5"], "alerts.mfu=5 is not a rule; write alerts.mfu.FIELD=..., or ~alerts.mfu to switch it off"),
        (["~alerts.stragler"], "Could not delete from config. 'alerts.stragler' does not exist."),
        (["alerts=[mfu,stragler]"], "alerts=stragler is not an option; did you mean straggler?"),
        (["alerts=null"], "alerts=null is not an option; alerts: "),
        (["alerts.mfu.action=page"], "alerts.mfu.action: Invalid value 'page', expected one of [log, wandb, stop, "),
        (["alerts.mfu.slice=node"], "alerts.mfu.slice: Invalid value 'node', expected one of [run, stage, rank, axis"),
        (["alerts.mfu.normal.min=abc"], "alerts.mfu.normal.min: Value 'abc' of type 'str' could not be converted"),
        (["alerts.mfu.normal.max=.nan"], "alerts.mfu.normal.max: Value '.nan' of type 'str'"),
        (["alerts.mfu.normal.max=nan"], "alerts.mfu.normal.max=nan is not a finite number"),
        (["alerts.mfu.normal=5"], "alerts.mfu: Merge error: int is not a subclass of NormalRange"),
        (["alerts.mfu.normal.max=0.5"], "alerts.mfu.normal: min=0.8 is above max=0.5"),
        (["alerts.mfu.persistence={n: 3, m: 2}"], "alerts.mfu.persistence: n=3 of m=2 observations cannot be"),
        (["alerts.mfu.persistence.n=0"], "alerts.mfu.persistence: n=0 of m=10 observations cannot be"),
        (["alerts.loss_spike.normal.max=null"], "alerts.loss_spike.normal is relative to recent but has no bound"),
        (["alerts.loss_spike.normal.window=1"], "alerts.loss_spike.normal.window=1 is too short for a median"),
        (
            ["alerts.loss_spike.normal.relative_to=prediction"],
            "alerts.loss_spike.metric=train/loss has no prediction to be relative to; of a run only train/mfu, ",
        ),
        (
            ["alerts.straggler.normal.relative_to=observation"],
            "alerts.straggler.metric=compute_s has no observation to be relative to; nothing of a rank has one",
        ),
        (["alerts.mfu.normal.relative_to=peers"], "alerts.mfu.normal.relative_to=peers compares ranks; it needs "),
        (["alerts.mfu.metric=trian/mfu"], "alerts.mfu.metric=trian/mfu is no key of metrics.jsonl; did you mean tra"),
        (["alerts.straggler.metric=train/mfu"], "alerts.straggler.metric=train/mfu is not kept of each rank"),
        (["alerts.communication_time.metric=train/mfu"], "alerts.communication_time.metric=train/mfu is not kept"),
    ],
)  # fmt: skip
def test_a_bad_rule_is_refused_with_one_line(arguments, line):
    (found,) = problems(*arguments)
    assert found.startswith(line) and "\n" not in found


def test_all_bad_rules_show_at_once():
    assert len(problems("alerts.mfu.normal.max=0.1", "alerts.straggler.persistence.n=9")) == 2
    assert len(problems("alerts.mfu.foo=1", "alerts.mine.metric=train/loss", "alerts.straggler.action=x")) == 3


def test_every_field_of_a_rule_has_its_sentence():
    assert [knob.key for knob in rule_knobs() if not knob.sentence] == []


def test_every_shipped_rule_is_in_the_default_and_names_what_to_try():
    files = set(options()["alerts"]) - {"default", "none"}
    assert set(compose_config([f"alerts=[{','.join(sorted(files))}]"]).alerts) == set(compose_config([]).alerts)
    for name, rule in compose_config([]).alerts.items():
        assert len(rule.mitigation) > 20 and "\n" not in rule.mitigation, name
        assert rule.action is AlertAction.wandb, "a shipped rule ends nobody's run"
    assert len(list((CONF / "alerts").glob("*.yaml"))) == len(files) + 2


def test_knobs_in_the_mitigations_are_knobs():
    """key.key words of the shipped texts; those that the telemetry of profiles will bring are apart."""
    later = {"telemetry.profile.steps"}
    for name, rule in compose_config([]).alerts.items():
        words = re.findall(
            r"\b((?:train|parallel|zero|optimizer|precision|data|checkpoint|telemetry)\.[\w.]*\w)", rule.mitigation
        )
        assert [word for word in words if not is_known(word) and word not in later] == [], name
