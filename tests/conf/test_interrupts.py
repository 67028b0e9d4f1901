"""Ctrl-C while a command's imports run: one line and code 130, whichever command it is."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.launched import ROOT, wait_for

COMMANDS = sorted(
    path
    for room in ("recipes", "launch")
    for path in (ROOT / room).glob("*.py")
    # Those that launchers alone start are not at anybody's keyboard.
    if "__main__" in path.read_text() and path.stem not in ("check_host", "on_host", "slurm", "slurm_rank")
)
FIRST = ("hydra", "omegaconf", "numpy", "torch", "csv")  # each command imports one of them after its own first lines

NEVER_IMPORTED = """
import os, time
open(os.environ["STARTED"], "w").close()
while True:
    try:
        time.sleep(60)
    except BaseException as error:
        raise ImportError from error
"""


@pytest.fixture
def slow_imports(tmp_path: Path) -> dict[str, str]:
    """An environment in which these packages tell that they are imported, and never are."""
    for name in FIRST:
        (tmp_path / f"{name}.py").write_text(NEVER_IMPORTED)
    aside = ("RANK", "WORLD_SIZE")
    return {key: value for key, value in os.environ.items() if key not in aside} | {"PYTHONPATH": str(tmp_path)}


def interrupted(command: list[str], started: Path, environ: dict[str, str]) -> tuple[int, str]:
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=environ | {"STARTED": str(started)}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        wait_for(lambda: started.exists() or process.poll() is not None, seconds=60, what="the import")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    return process.returncode, output


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_command_says_so_in_one_line(path, slow_imports, tmp_path):
    assert interrupted([str(path)], tmp_path / "started", slow_imports) == (130, "interrupted\n")


def test_so_does_a_question_of_local_sh_and_of_many_ranks_the_first(slow_imports, tmp_path):
    assert interrupted(["-m", "conf.ranks"], tmp_path / "0", slow_imports) == (130, "interrupted\n")
    recipe = [str(ROOT / "recipes" / "pretrain.py")]
    assert interrupted(recipe, tmp_path / "1", slow_imports | {"RANK": "1", "WORLD_SIZE": "2"}) == (130, "")


def test_every_command_that_is_shown_to_users_is_among_them():
    """Of those whose names stand behind `python` in README.md and docs/."""
    text = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    named = set(re.findall(r"python ((?:recipes|launch)/\w+\.py)", text))
    assert named <= {path.relative_to(ROOT).as_posix() for path in COMMANDS}
