"""A host's ranks of the probe: their rates come back, the first that fails ends all, and none outlives its time."""

from __future__ import annotations

import re
from typing import Any

import psutil
import pytest

from engine.distributed import free_port
from launch import check_rates


def order(**changes: Any) -> dict[str, Any]:
    about = {
        "seconds": 60.0, "ranks": [0], "world_size": 1, "address": "127.0.0.1", "port": free_port(), "device": "cpu",
        "slots": [0], "probe": {"hosts": [1], "dtype": "fp32"},
    }  # fmt: skip
    return about | changes


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch):
    for name in ("DS_ACCELERATOR", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, {"DS_ACCELERATOR": "cpu"}.get(name, "1"))
    yield
    assert not [one for one in psutil.Process().children() if "engine.probe_hosts" in one.cmdline()]


@pytest.mark.slow
def test_one_rank_measures_its_device_and_no_link():
    found = check_rates.rates(order())["found"]
    assert len(found["matrix"]) == 1 and found["matrix"][0] > 1e6 and found["links"] == []


@pytest.mark.slow
def test_the_first_rank_that_fails_ends_all_at_once():
    answer = check_rates.rates(order(ranks=[0, 1], world_size=2, probe={"hosts": [2], "dtype": "none"}))
    assert re.fullmatch(r"a rank failed: (\[rank\d\]: )?KeyError: 'none'", answer["problem"]) and answer["after"] < 40


def test_ranks_that_wait_for_others_are_ended_when_the_time_is_over():
    answer = check_rates.rates(order(seconds=1.0, world_size=2))
    assert answer["problem"] == "its ranks did not end within 1 s" and answer["after"] >= 1
