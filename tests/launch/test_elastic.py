"""launch/elastic.py: the code of the first rank that failed, where torchrun says 1."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.launched import ROOT, wait_for

ELASTIC = [sys.executable, str(ROOT / "launch" / "elastic.py"), "--nproc-per-node", "2"]
RANK = """
import os, signal, sys, time
print("shared", os.environ.get("TORCHELASTIC_USE_AGENT_STORE"), flush=True)
if sys.argv[1] == "waits":
    signal.signal(signal.SIGTERM, lambda n, frame: (open("saved-" + os.environ["RANK"], "w"), os._exit(75)))
    open("waits-" + os.environ["RANK"], "w").close()
    time.sleep(60)
if os.environ["RANK"] == "1" or sys.argv[1] == "0":
    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "killed" else sys.exit(int(sys.argv[1]))
time.sleep(60)
"""


@pytest.fixture
def rank(tmp_path: Path) -> str:
    (tmp_path / "rank.py").write_text(RANK)
    return str(tmp_path / "rank.py")


def call(rank: str, how: str, **environ: str) -> tuple[int, str]:
    aside = ("RANK", "WORLD_SIZE", "MASTER_PORT", "RETRY_CODE")
    kept = {name: value for name, value in os.environ.items() if name not in aside}
    done = subprocess.run(
        [*ELASTIC, rank, how],
        env=kept | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=90,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("how", "code", "retry"),
    [
        ("0", 0, "138"),
        ("75", 75, None),
        ("75", 138, "138"),
        pytest.param("2", 2, "138", marks=pytest.mark.slow),
        pytest.param("76", 76, "138", marks=pytest.mark.slow),
        pytest.param("3", 138, "138", marks=pytest.mark.slow),
        pytest.param("killed", 137, None, marks=pytest.mark.slow),
    ],
)
def test_the_code_is_the_ranks_or_the_one_that_means_again(rank, how, code, retry):
    found, output = call(rank, how, **({} if retry is None else {"RETRY_CODE": retry}))
    assert found == code, output
    assert "shared False" in output and "shared True" not in output


def test_sigterm_lets_the_ranks_save_and_says_143(rank, tmp_path):
    with subprocess.Popen([*ELASTIC, rank, "waits"], cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: all((tmp_path / f"waits-{one}").exists() for one in (0, 1)), seconds=60, what="two ranks")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143
    assert all((tmp_path / f"saved-{one}").exists() for one in (0, 1))
