"""A rank that hangs, or is stopped: the run ends in time, and says which rank, in which step and where."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from engine import last_state
from engine.culprits import Seen, culprits, verdict
from engine.watchdog import Watchdog
from tests.engine.test_failure import LAUNCHERS, OVERRIDES, SCRIPT
from tests.ranks import RankError, run_ranks

pytestmark = pytest.mark.alone

TIMEOUT_S = 8.0
COMPUTES = Seen(14, "ForwardPass(buffer_id=1)", None, 31.0)
RECEIVES = Seen(14, "RecvActivation(buffer_id=0)", "RecvActivation(buffer_id=0)", 30.5)
REDUCES = Seen(14, "BackwardPass(buffer_id=0)", "all_reduce", 30.0)


def test_the_rank_that_waits_for_nobody_holds_the_others_up() -> None:
    assert culprits({0: RECEIVES, 1: RECEIVES, 2: COMPUTES, 3: REDUCES}) == [2]


def test_a_silent_rank_is_named_before_one_that_computes() -> None:
    silent = Seen(14, "RecvGrad(buffer_id=0)", "RecvGrad(buffer_id=0)", 0.2, silent=True)
    assert culprits({0: COMPUTES, 1: silent}) == [1]


def test_of_several_that_compute_the_one_a_step_behind_is_named() -> None:
    behind = Seen(13, "end of train_batch", None, 40.0)
    assert culprits({0: COMPUTES, 1: behind, 2: COMPUTES}) == [1]


def test_where_all_wait_the_one_a_step_behind_is_named_and_none_in_one_step() -> None:
    assert culprits({0: RECEIVES, 1: Seen(13, "save", "gather", 31.0)}) == [1]
    assert culprits({0: RECEIVES, 1: REDUCES}) == []


def test_a_run_of_one_rank_names_it() -> None:
    assert culprits({0: REDUCES}) == [0]


def test_the_verdict_groups_ranks_that_do_the_same() -> None:
    ranks = {0: RECEIVES, 1: RECEIVES, 2: COMPUTES, 3: REDUCES, 4: RECEIVES}
    assert verdict(ranks, timeout_s=30) == (
        "no progress for 30 s in step 14: rank 2: in ForwardPass(buffer_id=1) of step 14 for 31 s; "
        "ranks 0-1, 4: waiting in RecvActivation(buffer_id=0); "
        "rank 3: waiting in all_reduce (BackwardPass(buffer_id=0))"
    )


def test_notes_keep_the_step() -> None:
    last_state.now("train_batch", step=7)
    last_state.now("ForwardPass", buffer_id=1)
    assert last_state.current()[:4] == (7, "ForwardPass", {"buffer_id": 1}, False)
    assert re.match(r"last state: step 7, ForwardPass\(buffer_id=1\) since ..:..:.. \(0.0 s\)$", last_state.describe())


def test_other_threads_count_as_movement_but_leave_the_last_state_alone() -> None:
    last_state.now("train_batch", step=8)
    before = last_state.mark()
    thread = threading.Thread(target=last_state.now, args=("write",))
    thread.start()
    thread.join()
    assert last_state.current().what == "train_batch"
    assert last_state.mark() != before


def idle(folder: Path, busy_rank: int | None) -> str:
    watchdog = Watchdog(folder, rank=dist.get_rank(), world_size=2, timeout_s=3.0)
    end = time.monotonic() + 7.0
    while time.monotonic() < end:
        if dist.get_rank() == busy_rank:
            last_state.now("load")
        time.sleep(0.05)
    dist.barrier()
    watchdog.close()
    return last_state.current().what


def test_a_rank_that_waits_for_one_that_moves_goes_on_waiting(tmp_path: Path) -> None:
    assert run_ranks(2, idle, tmp_path, 1)[1] == "load"
    assert not list(tmp_path.iterdir())


def test_where_no_rank_moves_all_end(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="the process died without an answer"):
        run_ranks(2, idle, tmp_path, None)
    assert "no progress for 3 s in step" in json.loads((tmp_path / "failed.json").read_text())["error"]


@pytest.mark.parametrize(
    ("fault", "rank", "seconds"),
    [
        ("hang", 2, TIMEOUT_S + 15),
        pytest.param("hang", 0, TIMEOUT_S + 15, marks=pytest.mark.slow),
        # DeepSpeed's launcher asks with SIGTERM, which a stopped process does not take, and kills after 30 s.
        pytest.param("stop", 2, TIMEOUT_S + 50, marks=pytest.mark.slow),
        pytest.param("stop", 0, TIMEOUT_S + 50, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_stands_still_ends_the_run(fault: str, rank: int, seconds: float, tmp_path: Path) -> None:
    environ = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
    command = [*LAUNCHERS["local.sh"], str(SCRIPT), *OVERRIDES, f"cluster.hang_timeout_s={TIMEOUT_S}"]
    command += ["telemetry.wandb.mode=disabled", "checkpoint.interval=0"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ | {"FAULT": fault, "FAULT_RANK": str(rank), "DS_ACCELERATOR": "cpu"},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    ended = time.time()
    folder = tmp_path / "runs" / "default" / "r"
    assert done.returncode == 1, done.stdout + done.stderr
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert ended - (folder / "metrics.jsonl").stat().st_mtime < seconds
    lines = re.findall(r"^no progress for 8 s in step 3: rank .*$", done.stderr, re.MULTILINE)
    assert len(lines) == 1, done.stderr
    failed = json.loads((folder / "failed.json").read_text())
    assert (failed["rank"], failed["error"]) == (rank, lines[0])
    assert f"step 3: rank {rank}" in lines[0]
    for one in range(4):
        log = (folder / f"rank-{one}.log").read_text()
        assert "last state" in log, f"rank {one}: {log}"
        assert one == rank or "step 3, " in log, f"rank {one}: {log}"
    assert not [p.pid for p in psutil.process_iter(["cmdline"]) if str(SCRIPT) in (p.info["cmdline"] or [])]
