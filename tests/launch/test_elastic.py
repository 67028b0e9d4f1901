"""launch/elastic.py: the code of the first rank that failed, where torchrun says 1."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from engine.distributed import free_port
from launch import elastic
from tests.engine.launched import ROOT, wait_for

pytestmark = pytest.mark.alone

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


def call(rank: str, how: str, *, options: Sequence[str] = (), **environ: str) -> tuple[int, str]:
    aside = ("RANK", "WORLD_SIZE", "MASTER_PORT", "RETRY_CODE", "RETRY_LIMIT")
    kept = {name: value for name, value in os.environ.items() if name not in aside}
    done = subprocess.run(
        [*ELASTIC, *options, rank, how],
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


def test_a_failure_is_retried_until_it_is_one_too_many_in_a_row(tmp_path):
    counts, quick = tmp_path / "retries", elastic.QUICK_S - 1
    assert [elastic.may_retry(137, quick, 3, counts) for _ in range(3)] == [True, True, False]
    counts.unlink()
    story = [(1, quick), (1, quick), (75, 1.0), (143, 1.0), (1, elastic.QUICK_S + 1), (1, quick), (1, quick)]
    assert [elastic.may_retry(code, seconds, 3, counts) for code, seconds in story] == [True] * 6 + [False]


@pytest.mark.parametrize(("code", "found"), [(1, 1), (137, 1), (2, 2), (76, 76), (0, 0), (75, 138)])
def test_the_last_retry_ends_below_the_codes_that_mean_again_and_forgets_the_count(tmp_path, monkeypatch, code, found):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RETRY_CODE", "138")
    monkeypatch.setenv("RETRY_LIMIT", "2")
    counts = tmp_path / f"retries-{socket.gethostname()}"
    counts.write_text("1\n")
    monkeypatch.setattr(elastic, "run", lambda argv: code)
    assert elastic.main([]) == found
    assert counts.exists() == (found == 138)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which something listens that says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


C10D = ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint"]


@pytest.mark.parametrize(
    ("options", "code", "line"),
    [
        pytest.param(
            lambda port: [*C10D, f"127.0.0.1:{port}"], 1, "launch/elastic.py: what listens on port {} of 127.0.0.1 is",
            id="c10d", marks=pytest.mark.slow,
        ),
        pytest.param(lambda port: ["--master-port", str(port)], 1, "port: {}, ", id="static"),
    ],
)  # fmt: skip
def test_a_port_that_another_program_has_is_told_in_seconds(rank, taken, monkeypatch, options, code, line):
    """Case F4."""
    began = time.monotonic()
    found, output = call(rank, "0", options=options(taken))
    assert found == code and line.format(taken) in output and "Traceback" not in output, output
    assert time.monotonic() - began < 30


def test_a_store_of_torchruns_is_none_and_so_is_a_port_that_nobody_has():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    assert elastic.stranger_at_the_rendezvous([*C10D, f"127.0.0.1:{store.port}", "recipe.py"]) is None
    assert elastic.stranger_at_the_rendezvous([*C10D, f"127.0.0.1:{free_port()}", "recipe.py"]) is None


def test_sigterm_lets_the_ranks_save_and_says_143(rank, tmp_path):
    with subprocess.Popen([*ELASTIC, rank, "waits"], cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: all((tmp_path / f"waits-{one}").exists() for one in (0, 1)), seconds=60, what="two ranks")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143
    assert all((tmp_path / f"saved-{one}").exists() for one in (0, 1))
