"""launch/preflight.sh --slurm in a job of a real Slurm: its hosts are asked through srun, and what is wrong is told."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.runs import ROOT, SHOWS
from tests.cluster.slurm import Slurm

pytestmark = pytest.mark.slow
PREFLIGHT = f"{ROOT}/launch/preflight.sh --slurm --json found.json"
RUN = "recipes/pretrain.py model=llama_tiny parallel=tp2_pp2 train.global_batch_size=8"


def preflight(slurm: Slurm, folder: Path, *words: str) -> tuple[tuple[str, int], str, dict[str, Any]]:
    """How the job ended, what it printed, and what --json says."""
    options = ["-N", "2", "--ntasks-per-node=2", "--wrap", f"{PREFLIGHT} {' '.join(words)} {RUN}"]
    job = slurm.submit(options, folder)
    end, output = slurm.wait(job), (folder / f"slurm-{job}.out").read_text()
    assert (folder / "found.json").exists(), output
    assert slurm.processes() == []
    return end, output, json.loads((folder / "found.json").read_text())["checks"]


def test_hosts_that_are_well_are_told_so(slurm: Slurm, tmp_path: Path) -> None:
    end, output, found = preflight(slurm, tmp_path, "--quick")
    assert end == ("COMPLETED", 0), output
    assert "4 ranks on w0, w1, each: " in output and "srun --nodelist=HOST" in output
    assert "preflight: 15 checks on 2 hosts, nothing is wrong" in output
    assert all(cell["ok"] for cells in found.values() for cell in cells.values())


def test_ranks_of_both_measure_their_devices_and_links(slurm: Slurm, tmp_path: Path) -> None:
    """Whether they differ here is the load's matter: that both were measured counts."""
    _, output, found = preflight(slurm, tmp_path)
    assert {"matrix rate", "link rate"} <= found.keys() and len(found) == 17, output
    for check in ("matrix rate", "link rate"):
        assert all(cell["ok"] is not None and "/s" in cell["text"] for cell in found[check].values()), output


def test_a_host_that_does_not_share_the_runs_folder_is_told_and_the_code_says_so(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    slurm.hosts[1].run(["mount", "-t", "tmpfs", "tmpfs", str(tmp_path / "runs")])
    try:
        end, output, found = preflight(slurm, tmp_path, "--quick")
    finally:
        slurm.hosts[1].run(["umount", str(tmp_path / "runs")])
    red = {(check, host) for check, cells in found.items() for host, cell in cells.items() if cell["ok"] is False}
    assert end == ("FAILED", 1) and red == {("run folder", "w1"), ("corpus folder", "w1")}, output
    assert "w1: run folder: " in output and "mount the shared disk there" in output


def test_several_launchers_on_a_host_do_not_each_start_all_ranks(slurm: Slurm, tmp_path: Path) -> None:
    """Case F6: srun of a task a rank and a launcher that starts ranks."""
    deepspeed = Path(sys.executable).with_name("deepspeed")
    command = f"DS_ACCELERATOR=cpu srun {deepspeed} --num_gpus 2 {SHOWS} parallel=tp2 run.id=r"
    job = slurm.submit(["-N", "1", "--ntasks-per-node=2", "--wrap", command], tmp_path)
    state, code = slurm.wait(job)
    output = (tmp_path / f"slurm-{job}.out").read_text()
    assert state == "FAILED" and code == 2, output
    assert "error: srun started 2 tasks, several on a host, and each started ranks of its own; start one" in output
    assert slurm.processes() == []
