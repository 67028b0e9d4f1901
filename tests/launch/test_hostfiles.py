"""Case F2: what a hostfile and filters say, through every launcher that takes them; what cannot be starts nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import multinode, node, preflight
from tests.engine.launched import BIN, LOCAL, ROOT, finish

RECIPE = ["recipes/pretrain.py", "model=llama_tiny", "train.global_batch_size=12"]
# Launcher -> (its main, the name that its lines begin with, its own options).
LAUNCHERS: dict[str, tuple[Callable[[], int], str, list[str]]] = {
    "multinode.sh": (multinode.main, "launch/multinode.sh", []),
    "multinode.sh --launcher openmpi": (multinode.main, "launch/multinode.sh", ["--launcher", "openmpi"]),
    "node.sh": (node.main, "launch/node.sh", ["--node_rank", "0"]),
    "preflight.sh": (preflight.main, "launch/preflight.sh", ["--quick"]),
}
BAD = {
    "a byte order mark": ("\ufeffw0 slots=2\n", [], "line 1: '\\ufeffw0 slots=2': it begins with a byte order mark"),
    "no slot": ("w0 slots=2\nw1 slots=0\n", [], "line 2: 'w1 slots=0': it has no slot; give it 1 or more"),
    "a port": ("10.0.0.1:2222 slots=2\n", [], "line 1: '10.0.0.1:2222 slots=2': a port does not belong here"),
    "slots missing": ("w0 slots=2\n\nw1\n", [], "line 3: 'w1': it is not `NAME slots=RANKS`"),
    "slots in capitals": ("w0 SLOTS=2\n", [], "line 1: 'w0 SLOTS=2': it is not `NAME slots=RANKS`"),
    "slots that are no number": ("w0 slots=two\n", [], "line 1: 'w0 slots=two': it is not `NAME slots=RANKS`"),
    "a host twice": ("w0 slots=2\nw0 slots=1\n", [], "line 2: 'w0 slots=1': w0 is in line 1 already"),
    "no host": ("# none\n\n", [], "hosts names no host"),
    "no file": (None, [], "hosts: No such file or directory"),
    "a filter that leaves none": ("w0 slots=2\nw1 slots=2\n", ["-e", "w0@w1"], "-e w0@w1 leaves no host of w0, w1"),
    "a filter of an unknown host": ("w0 slots=2\n", ["-i", "w7"], "-i w7: 'w7' is not in the hostfile; it has w0"),
    "a filter with a range": ("w0 slots=3\n", ["-i", "w0:0-2"], "'0-2' are not slots; list them, as in w0:0,2"),
    "a slot beyond": ("w0 slots=2\n", ["-e", "w0:2"], "-e w0:2: w0 has no slot 2; its slots are 0 to 1"),
    "slots that the plan does not divide": (
        "w0 slots=2\nw1 slots=2\n", ["-e", "w1:0"],
        "parallel.tp=2 x parallel.pp=1 = 2 does not divide the 3 slots of the hosts (w0 2, w1 1); give 4 slots, or 2",
    ),
}  # fmt: skip
GOOD = "# the hosts\r\n\r\nw0\tslots=2 # the first\r\n  w1 slots=2 max_slots=4  \r\n\n"


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """(code, stdout, stderr) of a launcher's dry run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DRY_RUN", "1")
    for name in ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "SLURM_STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)

    def run(launcher: str, hosts: str | None, *filters: str) -> tuple[int, str, str]:
        main, _, options = LAUNCHERS[launcher]
        if hosts is not None:
            (tmp_path / "hosts").write_bytes(hosts.encode())
        words = [*options, "hosts", *filters, *RECIPE, "parallel=tp2"]
        monkeypatch.setattr("sys.argv", ["launcher.py", *words])
        code = main()
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_cannot_be_is_one_line_and_nothing_starts(call, launcher, case):
    hosts, filters, line = BAD[case]
    code, out, err = call(launcher, hosts, *filters)
    assert (code, out) == (2, "") and line in err and err.startswith(f"{LAUNCHERS[launcher][1]}: ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_comments_blanks_tabs_and_ends_of_lines_are_fine_and_filters_count(call, launcher):
    assert "4 ranks" in call(launcher, GOOD)[1]
    code, out, err = call(launcher, GOOD, "-e", "w1:0@w0:1")
    assert (code, err) == (0, "") and "2 ranks" in out and "w0, w1" in out


def test_the_jobs_of_a_sweep_are_refused_by_their_launcher_with_its_line(tmp_path):
    """launch/sweep.py hands the hostfile on."""
    (tmp_path / "hosts").write_text("w0 slots=0\n")
    command = [sys.executable, str(ROOT / "launch" / "sweep.py"), "--id", "s", "--launch", "launch/multinode.sh hosts"]
    code, output = finish([*command, "-m", "seed=1,2", *RECIPE[1:]], tmp_path)
    assert code == 2 and output.count("refused after") == 2 and "'w0 slots=0': it has no slot" in output, output
    assert not (tmp_path / "runs" / "s" / "s-00").exists()


def test_local_sh_takes_the_gpus_that_are_shown_and_not_others(tmp_path):
    """A mask is neither dropped nor shifted, and one that shows too few is refused."""
    environ = os.environ | {"DS_ACCELERATOR": "cuda", "DRY_RUN": "1", "CUDA_VISIBLE_DEVICES": "5,3,GPU-7"}
    command = [str(LOCAL), "-n", "2", *RECIPE, "parallel=tp2"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0 and "--include localhost:5\\,3 " in done.stdout, done.stderr
    command[2] = "4"
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 2 and "4 ranks but CUDA_VISIBLE_DEVICES=5,3,GPU-7" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "code"),
    [
        ([str(BIN / "deepspeed"), "--num_gpus", "3", "--master_port", "31501"], 2),
        ([str(BIN / "torchrun"), "--nproc-per-node", "3", "--master-port", "31502"], 1),  # whatever its ranks' is
        ([sys.executable, str(ROOT / "launch" / "elastic.py"), "--nproc-per-node", "3", "--master-port", "31503"], 2),
        ([str(LOCAL), "-n", "3"], 2),
    ],
    ids=["deepspeed", "torchrun", "elastic.py", "local.sh"],
)
def test_three_ranks_do_not_share_out_a_plan_of_two(tmp_path: Path, launcher, code):
    """Through the launchers that take no hostfile the ranks themselves refuse it."""
    recipe = [str(ROOT / "recipes" / "pretrain.py"), *RECIPE[1:], "parallel=tp2"]
    found, output = finish([*launcher, *recipe], tmp_path)
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert found == code and len(lines) == 1, output
    assert "parallel.tp=2 x parallel.pp=1 = 2" in lines[0] and "3 ranks" in lines[0]
    assert not (tmp_path / "runs").exists()
