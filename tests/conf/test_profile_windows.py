"""telemetry.profile: what may be typed, and one clear line for what may not."""

from __future__ import annotations

import pytest

from conf.cli import compose_config
from conf.load import ConfigError
from conf.profile_windows import profile_problems, profile_windows


@pytest.mark.parametrize(
    ("typed", "windows"),
    [
        ("10", ((10, 10),)),
        ("10-12", ((10, 12),)),
        ("[20,10-12]", ((10, 12), (20, 20))),
        ('"10-12,20"', ((10, 12), (20, 20))),
        ("null", ()),
    ],
)
def test_windows_are_read_from_what_the_command_line_takes(typed, windows):
    config = compose_config([f"telemetry.profile.steps={typed}"])
    assert profile_windows(config.telemetry.profile.steps) == windows
    assert list(profile_problems(config, world_size=1)) == []


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["telemetry.profile.steps=soon"], "telemetry.profile.steps=soon: 'soon' is no step; use a step such as 10"),
        (["telemetry.profile.steps=12-10"], "telemetry.profile.steps=12-10: 12-10 is no window: steps count from 1"),
        (["telemetry.profile.steps=0"], "telemetry.profile.steps=0: 0 is no window"),
        (["telemetry.profile.steps=[3-5,5]"], "telemetry.profile.steps=[3-5,5]: step 5 is in two of them"),
        (["telemetry.profile.steps=99-101"], "telemetry.profile.steps=99-101 goes beyond train.train_iters=100"),
        (["telemetry.profile.ranks=[0,4]"], "telemetry.profile.ranks=[0,4]: 4 is no rank of 4; use 0 to 3"),
    ],
)
def test_each_fault_is_one_line(overrides, line):
    [found] = profile_problems(compose_config(overrides), world_size=4)
    assert found.startswith(line)


def test_a_bare_comma_is_told_apart_from_a_sweep():
    with pytest.raises(ConfigError, match=r"telemetry.profile.steps=10-12,20': write key=\[a,b\] for a list, or -m"):
        compose_config(["telemetry.profile.steps=10-12,20"])
