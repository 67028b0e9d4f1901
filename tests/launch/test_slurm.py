"""Slurm's lists, and how a job's tasks become ranks, without Slurm: case F6."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from conf.load import ConfigError
from conf.schema import Config
from launch import slurm, slurm_rank
from launch.remote import ROOT
from launch.slurm_layout import layout
from launch.slurm_names import expand_counts, expand_hosts, names, number

LISTED = "a,b[001-003,010],c-[1-2]-x"
HOSTS = ["a", "b001", "b002", "b003", "b010", "c-1-x", "c-2-x"]


def fake_scontrol(folder: Path, script: str) -> None:
    (folder / "scontrol").write_text(f"#!/bin/bash\n{script}\n")
    (folder / "scontrol").chmod(0o755)


def test_hosts_are_written_out_with_their_zeros_without_scontrol(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert names(LISTED) == HOSTS


def test_scontrol_is_asked_where_there_is_one(monkeypatch, tmp_path):
    fake_scontrol(tmp_path, '[[ "$*" == "show hostnames x[1-2]" ]] && printf "%s\\n" x1 x2')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert names("x[1-2]") == ["x1", "x2"]
    fake_scontrol(tmp_path, "echo Invalid >&2; exit 1")
    with pytest.raises(ConfigError, match=r"scontrol does not read the hosts 'x\[': Invalid"):
        names("x[")
    fake_scontrol(tmp_path, "echo Invalid >&2")
    with pytest.raises(ConfigError, match=r"scontrol does not read the hosts 'x\[2-1\]': Invalid"):
        names("x[2-1]")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("gpu-[08-11]", ["gpu-08", "gpu-09", "gpu-10", "gpu-11"]),
        ("r[1-2]n[0,5]", ["r1n0", "r1n5", "r2n0", "r2n5"]),
        ("[1-2],x", ["1", "2", "x"]),
    ],
)
def test_ranges_give_every_combination(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "a,", "a,,b", "a[1-2", "a[x]", "a]1[", "w[3-1]", "w[1,10-09]"])
def test_what_is_no_list_of_hosts_is_refused(text):
    with pytest.raises(ConfigError):
        expand_hosts(text)


@pytest.mark.parametrize(
    ("text", "counts"), [("2(x3),1", [2, 2, 2, 1]), ("8", [8]), ("4(x2)", [4, 4]), ("1,2", [1, 2])]
)
def test_counts_are_written_out(text, counts):
    assert expand_counts(text) == counts


def test_what_is_no_count_is_refused():
    with pytest.raises(ConfigError, match="are not counts"):
        expand_counts("2(x3")


def of(plan: str, **environ: str):
    config = Config()
    config.parallel.tp, config.parallel.pp = {"tp1": (1, 1), "tp2": (2, 1), "tp2_pp2": (2, 2)}[plan]
    return layout(environ, ["w0", "w1"], config)


def test_a_task_a_host_takes_the_hosts_gpus_or_what_the_plan_needs():
    assert of("tp2_pp2").ranks == (2, 2) and not of("tp2_pp2").task_per_rank
    assert of("tp1").ranks == (1, 1)
    assert of("tp2", SLURM_NTASKS="2", SLURM_TASKS_PER_NODE="1(x2)", SLURM_GPUS_ON_NODE="8").ranks == (8, 8)
    assert of("tp1", SLURM_TASKS_PER_NODE="64(x2)").ranks == (1, 1)  # nobody asked for tasks: that is the CPUs


def test_several_tasks_a_host_are_ranks():
    found = of("tp2", SLURM_NTASKS="6", SLURM_TASKS_PER_NODE="4,2")
    assert (found.ranks, found.task_per_rank, found.tasks) == ((4, 2), True, 6)
    assert of("tp2", SLURM_NTASKS_PER_NODE="8", SLURM_TASKS_PER_NODE="8(x2)", SLURM_GPUS_ON_NODE="8").tasks == 16
    alike = {"SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "5", "SLURM_NPROCS": "5"}
    assert of("tp1", **alike, SLURM_NTASKS_PER_NODE="3", SLURM_TASKS_PER_NODE="3,2").ranks == (3, 2)


@pytest.mark.parametrize(
    ("plan", "environ", "line"),
    [
        (
            "tp2", {"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_GPUS_ON_NODE": "8"},
            "w0 has 4 tasks and 8 GPUs; give --ntasks-per-node=8 (a task a rank) or --ntasks-per-node=1",
        ),
        ("tp2", {"SLURM_NTASKS": "7", "SLURM_TASKS_PER_NODE": "2(x3),1"}, "speaks of 4 hosts, SLURM_JOB_NODELIST of 2"),
        ("tp2", {"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2,1"}, "does not divide the 3 slots of the hosts"),
        (
            "tp1", {"SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "3(x2)"},
            "SLURM_NTASKS=5 but SLURM_TASKS_PER_NODE=3(x2), 6 in all; ",
        ),
        (
            "tp1", {"SLURM_NTASKS": "6", "SLURM_NPROCS": "2", "SLURM_TASKS_PER_NODE": "3(x2)"},
            "SLURM_NPROCS=2 but SLURM_TASKS_PER_NODE=3(x2), 6 in all; ",
        ),
        (
            "tp1", {"SLURM_NTASKS_PER_NODE": "4", "SLURM_TASKS_PER_NODE": "3(x2)"},
            "SLURM_NTASKS_PER_NODE=4 but SLURM_TASKS_PER_NODE=3(x2); ",
        ),
        (
            "tp1", {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "3,1"},
            "SLURM_NTASKS_PER_NODE=2 but SLURM_TASKS_PER_NODE=3,1; ",
        ),
        (
            "tp1", {"SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "w[0-1]"},
            "SLURM_NNODES=3 but SLURM_JOB_NODELIST=w[0-1] names 2 (w0, w1); ",
        ),
        (
            "tp1", {"SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "w[0-1]"},
            "SLURM_JOB_NUM_NODES=1 but SLURM_JOB_NODELIST=w[0-1] names 2 (w0, w1); ",
        ),
    ],
)  # fmt: skip
def test_what_would_start_other_ranks_than_meant_is_refused_in_a_line(plan, environ, line):
    with pytest.raises(ConfigError) as raised:
        of(plan, **environ)
    assert line in raised.value.problems[0] and len(raised.value.problems) == 1


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        ("SLURM_JOB_NODELIST", "SLURM_JOB_NODELIST is not set, as Slurm sets it in a job"),
        ("SLURM_JOB_ID", "this is no Slurm job; submit it"),
        ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_JOB_ID is not set, as Slurm sets it in a job"),
        ("SLURM_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE is not set, as Slurm sets it in a job"),
    ],
)
def test_a_variable_of_slurms_that_is_missing_is_one_line(tmp_path, missing, line):
    (tmp_path / "scontrol").write_text('#!/bin/bash\n[[ "$*" != *hostnames* ]] || echo w0\n')
    (tmp_path / "scontrol").chmod(0o755)
    job = {
        "SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "w0", "SLURM_ARRAY_JOB_ID": "4", "SLURM_ARRAY_TASK_ID": "0",
        "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2", "DRY_RUN": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }  # fmt: skip
    words = ["bash", str(ROOT / "launch" / "slurm.sbatch"), "recipes/pretrain.py"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")} | job
    if missing == "SLURM_JOB_ID":
        assert subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True).returncode == 0
    del environ[missing]
    done = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(f"launch/slurm.sbatch: {line}"), done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stdout == ""


def test_what_is_no_number_where_slurm_has_one_is_refused():
    with pytest.raises(ConfigError, match=r"^SLURM_JOB_ID=5a is not a number"):
        number({"SLURM_JOB_ID": "5a"}, "SLURM_JOB_ID")


@pytest.fixture
def job(monkeypatch, tmp_path):
    """The overrides that the job of an environment runs, in an empty folder with a recipe."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.py").touch()

    def run(*words: str, **environ: str) -> list[str]:
        return list(slurm.parse(list(words), {"SLURM_JOB_ID": "17", **environ}).request.overrides)

    return run


def test_a_run_is_named_by_its_job_and_array_task_unless_it_has_a_name(job):
    assert job("recipe.py") == ["run.id=slurm-17", "resume=auto"]
    task = {"SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "2"}
    assert job("recipe.py", **task) == ["run.id=slurm-15-2", "resume=auto"]
    assert job("recipe.py", "run.id=mine") == ["run.id=mine", "resume=auto"]


def test_a_requeued_job_goes_on_with_its_run_where_there_is_one(job, tmp_path):
    words = ["recipe.py", "resume=/some/checkpoint"]
    assert job(*words, SLURM_RESTART_COUNT="1") == ["resume=/some/checkpoint", "run.id=slurm-17"]  # it had not begun
    (tmp_path / "runs" / "default" / "slurm-17").mkdir(parents=True)
    assert job(*words, SLURM_RESTART_COUNT="1") == ["run.id=slurm-17", "resume=auto"]
    assert job(*words, SLURM_RESTART_COUNT="0") == ["resume=/some/checkpoint", "run.id=slurm-17"]


def test_an_array_task_takes_its_own_words_of_the_file(job, tmp_path):
    (tmp_path / "jobs.json").write_text(json.dumps([["run.id=s-00"], ["run.id=s-01", "telemetry.wandb.tags=[a b]"]]))
    task = {"SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "1"}
    assert job("--jobs", "jobs.json", "recipe.py", **task)[:2] == ["run.id=s-01", "telemetry.wandb.tags=[a b]"]
    with pytest.raises(ConfigError, match=r"has 2 jobs; submit it with --array=0-1"):
        job("--jobs", "jobs.json", "recipe.py")


@pytest.mark.parametrize(
    ("code", "requests", "goes_on"),
    [
        (75, [], True),  # a rank was told by Slurm itself
        (75, [signal.SIGUSR1], True),
        (143, [signal.SIGUSR1], True),  # before anything was trained
        (138, [signal.SIGUSR1], True),
        (143, [], False),
        (75, [signal.SIGTERM], False),
        (75, [signal.SIGUSR1, signal.SIGTERM], False),
        (0, [signal.SIGUSR1], False),
        (1, [signal.SIGUSR1], False),
        (76, [], False),
    ],
)
def test_only_what_slurm_stopped_is_requeued(code, requests, goes_on):
    assert slurm.is_to_go_on(code, requests) is goes_on


def test_ports_of_jobs_differ_and_one_in_use_is_passed_over():
    first = slurm.free_port(17)
    assert 10000 <= first < 30000 and slurm.free_port(18) != first
    with socket.create_server(("", first)):
        assert slurm.free_port(17) != first


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("srun: error: w1: task 3: Exited with exit code 3", ("w1", "3", "3", None)),
        ("srun: error: w[1-2]: tasks 2-3,5: Killed", ("w[1-2]", "2-3,5", None, "Killed")),
        ("srun: error: w1: task 3: Segmentation fault (core)", ("w1", "3", None, "Segmentation fault (core)")),
    ],
)  # fmt: skip
def test_sruns_lines_name_host_and_task(line, found):
    match = slurm.FAILED.match(line)
    assert match is not None and match.groups() == found


def test_a_task_becomes_a_rank_by_slurms_numbers(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    environ = {
        "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_NODEID": "0", "SLURMD_NODENAME": "w0", "MASTER_ADDR": "127.0.0.1", "SLURM_CPUS_PER_TASK": "6",
    }  # fmt: skip
    found = slurm_rank.rank_environ(environ, None)
    numbers = [found[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")]
    assert numbers == ["3", "3", "4", "4", "6"]
    assert slurm_rank.rank_environ({**environ, "OMP_NUM_THREADS": "1"}, None)["OMP_NUM_THREADS"] == "1"
    for shown, local in (("4,5,6,7", "3"), ("GPU-7", "0"), ("", "3")):
        assert slurm_rank.rank_environ({**environ, "CUDA_VISIBLE_DEVICES": shown}, None)["LOCAL_RANK"] == local
    with pytest.raises(ConfigError, match="host w0: its task 3 sees the GPUs 4,5 only; leave --gpu-bind out"):
        slurm_rank.rank_environ({**environ, "CUDA_VISIBLE_DEVICES": "4,5"}, None)
    with pytest.raises(ConfigError, match="host w0: it has no interface nothing"):
        slurm_rank.rank_environ(environ, "nothing")
    for name in environ.keys() - {"SLURM_CPUS_PER_TASK", "MASTER_ADDR"}:  # one host needs no address of another
        with pytest.raises(ConfigError, match=f"^{name} is not set"):
            slurm_rank.rank_environ({key: value for key, value in environ.items() if key != name}, None)
