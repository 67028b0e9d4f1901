"""How many ranks launch/local.sh starts, and the smaller plan where GPUs are few."""

from __future__ import annotations

import pytest

from conf.load import ConfigError
from conf.ranks import choose

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
