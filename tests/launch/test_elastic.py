"""launch/elastic.py: what it refuses before the hosts meet, and the code of the first rank that failed."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore
from torch.distributed.run import parse_args

from conf.load import ConfigError
from engine.distributed import free_port
from launch import elastic, elastic_request
from tests.engine.launched import ROOT, wait_for

pytestmark = pytest.mark.alone

ELASTIC = [sys.executable, str(ROOT / "launch" / "elastic.py"), "--nproc-per-node", "2"]
RANK = """
import os, signal, sys, time
os.write(1, f"shared {os.environ.get('TORCHELASTIC_USE_AGENT_STORE')}\\n".encode())  # two ranks, one line each
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


def dry(*words: str, **environ: str) -> tuple[int, str, str]:
    """(code, stdout, stderr) under DRY_RUN=1 of --nproc-per-node 2 and these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    done = subprocess.run(
        [*ELASTIC, *words], env=kept | {"DRY_RUN": "1"} | environ, cwd=ROOT, capture_output=True, text=True, timeout=90
    )
    return done.returncode, done.stdout, done.stderr


def test_a_dry_run_prints_what_each_rank_would_run_and_starts_none(tmp_path):
    words = ["recipes/pretrain.py", f"run.dir={tmp_path}", "train.sample_prompt='a $b'"]
    code, out, err = dry("--rdzv-backend", "c10d", "--rdzv-endpoint", "w0:29400", *words, PET_NNODES="2")
    assert (code, err) == (0, "") and list(tmp_path.iterdir()) == []
    ranks, torchrun = out.splitlines()
    where, _, command = ranks.partition(", each: ")
    assert where == "2 hosts x 2 ranks" and shlex.split(command)[1:] == ["-u", *words]
    assert "PET_NNODES=2" in torchrun and shlex.split(torchrun)[-len(words) :] == words


@pytest.mark.parametrize("words", [[], ["train.lr=1e-3", "--", "recipes/pretrain.py"]])
def test_a_recipe_is_found_in_the_repository_from_another_folder(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    argv = ["--nnodes", "2", "--nproc-per-node", "2", "recipes/pretrain.py", *words]
    found = elastic_request.with_recipe(argv, parse_args(argv))
    assert found == [*argv[:4], str(ROOT / "recipes" / "pretrain.py"), *words]
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "pretrain.py").touch()
    assert elastic_request.with_recipe(argv, parse_args(argv)) == argv
    argv[4] = "recipes/nothing.py"
    with pytest.raises(ConfigError, match=r"^there is no recipe recipes/nothing.py; see recipes/"):
        elastic_request.with_recipe(argv, parse_args(argv))


def test_the_command_is_printed_before_the_ranks_run(rank):
    code, output = call(rank, "0")
    lines = output.splitlines()
    assert code == 0 and lines[0].endswith(f"-u {rank} 0") and "shared False" in "".join(lines[2:])


BAD = [
    (["--nnodes", "2"], ["parallel.tp=3"], "parallel.tp=3 does not divide"),
    (["--nnodes", "2:2"], ["parallel=tp2", "train.global_batch_size=3"], "train.global_batch_size=3"),
    (["--nnodes", "2:4"], ["parallel.tp=3", "train.lr=-1"], "train.lr=-1 must be positive"),
    (["--nnodes", "2"], ["parallel.tp=3", "train.lrr=3"], "train.lrr is not a knob; did you mean train.lr?"),
    (["--nnodes", "two"], [], "--nnodes two is no number of hosts"),
    (["--nproc-per-node", "gpus"], [], "--nproc-per-node gpus: "),
    (["--nproc-per-node", "0"], [], "--nproc-per-node 0 starts no rank"),
    (["--nnodes", "2"], ["-m", "train.lr=1e-3,1e-4"], "-m would run every job inside each of the ranks"),
]


@pytest.mark.parametrize(("options", "words", "line"), BAD)
def test_what_cannot_be_is_refused_before_the_hosts_meet(options, words, line):
    asked = parse_args(["--nproc-per-node", "2", *options, str(ROOT / "recipes" / "pretrain.py"), *words])
    with pytest.raises(ConfigError) as raised:
        elastic_request.check(asked)
    assert raised.value.problems[0].startswith(line)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nnodes", "2:4"], ["parallel.tp=3"]),  # on how many ranks is known when they meet
        (["--nnodes", "2", "--nproc-per-node", "cpu"], ["parallel.tp=4"]),
        (["--nnodes", "2"], ["parallel=tp2_pp2"]),
        (["--nnodes", "1"], ["--cfg", "job", "parallel.tp=3"]),
    ],
)
def test_what_may_be_is_left_to_the_ranks(options, words):
    elastic_request.check(
        parse_args(["--nproc-per-node", "2", *options, str(ROOT / "recipes" / "pretrain.py"), *words])
    )


def test_each_of_two_hosts_refuses_a_bad_configuration_alone():
    """The other one is not there: without the check it would wait for it."""
    options = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    code, out, err = dry(*options, "recipes/pretrain.py", "train.lrr=3", DRY_RUN="0", RANK="1", RETRY_CODE="138")
    assert (code, out) == (2, "")
    assert err == "launch/elastic.py: train.lrr is not a knob; did you mean train.lr?\n"


def test_a_store_that_goes_away_is_one_line_that_names_its_host(rank, tmp_path):
    """Two launchers stand for two hosts; that of the first has the store, and is killed."""
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "x"]
    endpoint = f"127.0.0.1:{free_port()}"
    command = [*ELASTIC, *options, "--rdzv-endpoint", endpoint, rank, "waits"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as first:
        port = int(endpoint.rpartition(":")[2])
        wait_for(lambda: is_served(port), seconds=60, what="the store")
        with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as second:
            wait_for(lambda: all((tmp_path / f"waits-{n}").exists() for n in (0, 1)), seconds=60, what="two ranks")
            ranks = psutil.Process(first.pid).children()
            first.kill()
            _, said = second.communicate(timeout=60)
    for process in ranks:
        process.kill()
    assert second.returncode == 1
    line = "launch/elastic.py: the store on host 127.0.0.1 went away: its launcher ended, or it is cut off; "
    assert said.splitlines()[-1].startswith(line)
    assert "did not meet" not in said and "frame #" not in said


def is_served(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def test_hosts_that_do_not_come_are_said_not_to_have_met(rank):
    options = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-conf", "join_timeout=2"]
    code, output = call(rank, "0", options=[*options, "--rdzv-endpoint", f"127.0.0.1:{free_port()}"])
    assert code == 1
    assert output.splitlines()[-1] == "launch/elastic.py: the nodes did not meet: RendezvousTimeoutError", output
