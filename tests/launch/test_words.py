"""Case F3 through the launchers of one machine: words and environment reach every rank, and secrets nothing else.

Over hosts: tests/cluster/test_multinode_words.py, test_node.py, test_slurm.py, with the same words.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import psutil
import pytest

from conf.cli import compose_config
from conf.load import to_plain
from tests.cluster.runs import SHOWS, shown
from tests.cluster.test_multinode_words import ENVIRON, OVERRIDES
from tests.engine.launched import BIN, LOCAL, ROOT, start, wait_for

ELASTIC = [sys.executable, str(ROOT / "launch" / "elastic.py"), "--nproc-per-node", "2", "--master-port", "31511"]
SWEEP = [sys.executable, str(ROOT / "launch" / "sweep.py"), "--id", "waits", "-n", "2", "-m"]
LAUNCHERS = {
    "local.sh": [str(LOCAL), "-n", "2"],
    "elastic.py": ELASTIC,
    "torchrun": [str(BIN / "torchrun"), "--nproc-per-node", "2", "--master-port", "31512"],
    "deepspeed": [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", "31513"],
    "sweep.py": SWEEP,
}
UNMARKED = ("local.sh", "elastic.py")
GIVEN = {name: value for name, value in ENVIRON.items() if name != "CUDA_VISIBLE_DEVICES"}


@pytest.mark.parametrize(
    "launcher", [pytest.param(one, marks=() if one in UNMARKED else pytest.mark.slow) for one in LAUNCHERS]
)
def test_words_and_environment_arrive_unchanged_and_secrets_are_nowhere_else(launcher: str, tmp_path: Path) -> None:
    folder = tmp_path / "a b'$c (%n)"
    folder.mkdir()
    (folder / ".deepspeed_env").write_text("# which DeepSpeed reads for other hosts only\n\nA=b c\n")
    words, expected = list(OVERRIDES), compose_config(OVERRIDES)
    if launcher == "sweep.py":  # names, of the run and of its experiment, are the sweep's own
        words.remove("run.experiment=waits")
        expected = compose_config([*OVERRIDES, "run.id=waits-00"])
    process = start([*LAUNCHERS[launcher], SHOWS, *words], folder, **GIVEN)
    try:
        wait_for(lambda: all((folder / f"rank-{n}.json").exists() for n in (0, 1)), seconds=120, what="ranks")
        lines = [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])]
    finally:
        (folder / "go").touch()
        code = process.wait(timeout=60)
    output = (folder / "output.txt").read_text()
    assert code == 0, output
    for rank in (0, 1):
        found = shown(folder, rank)
        resume = {"resume": found["config"]["resume"]}  # local.sh and sweep.py say auto
        assert found["config"] == to_plain(expected) | resume and found["folder"] == str(folder)
        assert {name: found["environ"][name] for name in GIVEN} == GIVEN
    assert any(SHOWS in line for line in lines)
    rest = [path for path in folder.rglob("*") if path.is_file() and not re.fullmatch(r"rank-\d\.json", path.name)]
    assert not any("second\\line" in text for text in [output, *lines, *(path.read_text() for path in rest)])
