"""Jobs of a real Slurm over two hosts: the same numbers, words and environment as typed, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from conf.cli import compose_config
from conf.load import to_plain
from tests.cluster.runs import BIN, PRETRAIN, SHOWS, TINY, losses, shown
from tests.cluster.slurm import SBATCH, SUBMIT, Slurm
from tests.cluster.test_multinode import AT_MOST
from tests.cluster.test_multinode_words import ENVIRON, OVERRIDES
from tests.engine.launched import wait_for

TASK_A_HOST, TASK_A_RANK = ["-N", "2"], ["-N", "2", "--ntasks-per-node=2"]
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("tasks", "plan"),
    [
        (TASK_A_HOST, "parallel=tp1_pp2"),
        pytest.param([*TASK_A_HOST, "--ntasks-per-node=1"], "parallel=tp2_pp2", marks=SLOW),  # two ranks a host
        pytest.param(TASK_A_RANK, "parallel=tp2_pp2", marks=SLOW),
    ],
)
def test_a_job_trains_as_one_rank_does_in_one_folder(slurm, tmp_path, one_rank, tasks, plan):
    """Case F1 too: one run folder, whoever the ranks are."""
    job = slurm.submit([*tasks, SBATCH, PRETRAIN, *TINY, plan], tmp_path)
    assert slurm.wait(job) == ("COMPLETED", 0), (tmp_path / f"slurm-{job}.out").read_text()
    assert losses(tmp_path) == pytest.approx(one_rank, abs=AT_MOST)
    assert [path.name for path in (tmp_path / "runs" / "default").iterdir()] == ["r"]
    assert slurm.processes() == []


class Words:
    """What the ranks of a job were given, and what could be seen meanwhile."""

    def __init__(self, slurm: Slurm, folder: Path, tasks: list[str], ranks: int):
        folder.mkdir()
        self.folder = folder
        (folder / ".deepspeed_env").write_text("# mine\n\nMY_OWN=a b=c $HOME\n")
        self.job = slurm.submit([*tasks, SBATCH, SHOWS, *OVERRIDES], folder, **ENVIRON)
        files = [folder / f"rank-{rank}.json" for rank in range(ranks)]
        wait_for(lambda: all(file.exists() for file in files), seconds=120, what="ranks")
        seen = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
        seen.append(slurm.run("scontrol", "show", "job", "--details", self.job))
        seen += [path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file() and path not in files]
        self.spool = {path: path.read_bytes() for path in slurm.folder.rglob("*") if path.is_file()}
        self.seen = seen
        (folder / "go").touch()
        self.end = slurm.wait(self.job)
        self.ranks = [shown(folder, rank) for rank in range(ranks)]


@pytest.fixture(
    scope="module", params=[(TASK_A_RANK, 4), pytest.param((TASK_A_HOST, 2), marks=SLOW)], ids=["ranks", "hosts"]
)
def words(request, slurm, tmp_path_factory) -> Words:
    return Words(slurm, tmp_path_factory.mktemp("words") / "a b'$c", *request.param)


def test_overrides_and_environment_arrive_unchanged_on_every_rank(words):
    assert words.end == ("COMPLETED", 0)
    expected = to_plain(compose_config([*OVERRIDES, f"run.id=slurm-{words.job}", "resume=auto"]))
    for rank in words.ranks:
        assert rank["config"] == expected
        assert rank["folder"] == str(words.folder)
        for name in ENVIRON.keys() - {"CUDA_VISIBLE_DEVICES"}:
            assert rank["environ"][name] == ENVIRON[name]
        assert rank["environ"]["MY_OWN"] == "a b=c $HOME"


def test_secrets_are_on_no_command_line_and_in_no_file_but_slurms_own_of_the_environment(words):
    part = "second\\line"
    assert any("srun" in line for line in words.seen)
    assert not any(part in text for text in words.seen)
    assert {path.name for path, text in words.spool.items() if part.encode() in text} == {"environment"}


def test_ranks_are_numbered_by_host_and_meet_on_the_first_host(words):
    hosts = [rank["host"] for rank in words.ranks]
    assert hosts == sorted(hosts) and set(hosts) == {"w0", "w1"}
    each = len(hosts) // 2
    for rank in words.ranks:
        environ = rank["environ"]
        assert environ["MASTER_ADDR"] == "10.77.0.1" and 10000 <= int(environ["MASTER_PORT"]) < 30000
        assert environ["GLOO_SOCKET_IFNAME"] == environ["NCCL_SOCKET_IFNAME"] == "eth0"
        assert int(environ["LOCAL_RANK"]) == int(environ["RANK"]) % each and rank["of"] == len(hosts)


@SLOW
def test_two_jobs_at_once_on_the_same_hosts_do_not_meet(slurm, tmp_path):
    """Case F4."""
    folders, jobs = [tmp_path / "a", tmp_path / "b"], []
    for folder in folders:
        folder.mkdir()
        words = [*TASK_A_RANK, "--oversubscribe", SBATCH, SHOWS, "parallel=tp2_pp2", "run.experiment=waits"]
        jobs.append(slurm.submit(words, folder))
    wait_for(lambda: len(list(tmp_path.glob("?/rank-?.json"))) == 8, seconds=120, what="both")
    for folder in folders:
        (folder / "go").touch()
    assert [slurm.wait(job) for job in jobs] == [("COMPLETED", 0)] * 2
    assert len({shown(folder, rank)["environ"]["MASTER_PORT"] for folder in folders for rank in range(4)}) == 2


@SLOW
@pytest.mark.parametrize(
    ("tasks", "devices"),
    [
        (["--gpus-per-node=2"], [("0,1", "0"), ("0,1", "1"), ("2,3", "0"), ("2,3", "1")]),
        (["--gpus-per-node=2", "--ntasks-per-node=2"], [("0,1", "0"), ("0,1", "1"), ("2,3", "0"), ("2,3", "1")]),
        (["--gpus-per-task=1", "--ntasks-per-node=2"], [("0", "0"), ("1", "0"), ("2", "0"), ("3", "0")]),
    ],
    ids=["a task a host", "a task a rank", "a GPU a task"],
)
def test_ranks_see_the_gpus_of_their_job_and_no_other(slurm, tmp_path, tasks, devices):
    """The second job of the hosts gets the third and fourth GPU, which DeepSpeed's launcher would number 0 and 1."""
    folders = [tmp_path / "a", tmp_path / "b"]
    slurm.end()
    for folder in folders:
        folder.mkdir()
        options = ["-N", "2", *tasks, "--export=ALL,DS_ACCELERATOR=cuda"]
        job = slurm.submit([*options, SBATCH, SHOWS, "parallel=tp2_pp2", "run.experiment=waits"], folder)
        wait_for(lambda: len(list(folder.glob("rank-?.json"))) == 4, seconds=120, what=f"job {job}")  # noqa: B023
    for folder, of_a_host in zip(folders, (devices[:2], devices[2:]), strict=True):
        given = [shown(folder, rank)["environ"] for rank in range(4)]
        assert [(one.get("CUDA_VISIBLE_DEVICES"), one["LOCAL_RANK"]) for one in given] == of_a_host * 2
        (folder / "go").touch()
    wait_for(lambda: slurm.run("squeue", "--noheader") == "", seconds=60, what="the end of both")


@pytest.mark.parametrize(
    ("options", "words", "line"),
    [
        (TASK_A_RANK, ["parallel.tp=3"], "parallel.tp=3 x parallel.pp=1 = 3 does not divide the 4 slots of the hosts"),
        (["-N", "2", "--export=ALL,MASTER_ADDR=10.9.9.9"], [], "MASTER_ADDR=10.9.9.9 is no address of w0"),
        pytest.param(["-N", "2", "--export=ALL,MASTER_ADDR="], [], "MASTER_ADDR is empty", marks=SLOW),
        pytest.param(TASK_A_HOST, ["train.lrr=1"], "train.lrr is not a knob; did you mean train.lr?", marks=SLOW),
    ],
)
def test_what_cannot_be_ends_the_job_with_code_2_and_a_line(slurm, tmp_path, options, words, line):
    job = slurm.submit([*options, SBATCH, SHOWS, *words], tmp_path)
    assert slurm.wait(job) == ("FAILED", 2)
    assert f"launch/slurm.sbatch: {line}" in (tmp_path / f"slurm-{job}.out").read_text()
    assert not list(tmp_path.glob("rank-*"))


def test_a_sweep_is_an_array_in_which_one_job_may_fail(slurm, tmp_path):
    (tmp_path / "recipe.py").write_text(f"""
import os, sys
sys.path.insert(0, {str(Path(SHOWS).parents[2])!r})
from conf.cli import main
def run(config, plan):
    if config.train.lr > 0.05:
        return 3
    open(f"{{config.run.id}} {{config.train.sample_prompt}}", "w").close()
if __name__ == "__main__":
    main(run)
""")
    command = [str(BIN / "python"), SUBMIT, "--sbatch", "-N 1 --ntasks-per-node=2", "--id", "s", "--array-limit", "1"]
    command += ["-m", "recipe.py", "parallel=tp2", "train.lr=0.1,0.01", "train.sample_prompt='[a] $b'"]
    code, output = slurm.call(command, tmp_path)
    assert code == 0, output
    job = output.splitlines()[-1].removeprefix("job ").partition(";")[0]
    assert slurm.wait(f"{job}_0") == ("FAILED", 3) and slurm.wait(f"{job}_1") == ("COMPLETED", 0)
    assert (tmp_path / "s-01 [a] $b").exists() and not list(tmp_path.glob("s-00 *"))
    assert len(json.loads((tmp_path / "slurm-s.json").read_text())) == 2
    assert all((tmp_path / f"slurm-{job}_{task}" / "rank-0.log").exists() for task in (0, 1))
