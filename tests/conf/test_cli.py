"""The command line as a process: exit codes, time, streams, launcher arguments, Hydra's own flags.

The recipe is a few lines that print what they were given: no torch, no process group.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from conf.cli import main

def run(config, plan):
    assert "torch" not in sys.modules and "deepspeed" not in sys.modules and "transformers" not in sys.modules
    import os
    print(config.train.lr, plan.world_size, os.environ.get("OMP_NUM_THREADS"), os.getcwd())
    if config.run.experiment == "interrupted":
        raise KeyboardInterrupt
    return {{"fails": 7}}.get(config.run.experiment)

if __name__ == "__main__":
    main(run)
"""
CLEAN = {
    key: value
    for key, value in os.environ.items()
    if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")
}


@pytest.fixture
def call(tmp_path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE)

    def run(*arguments: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(recipe), *arguments],
            cwd=cwd or tmp_path, env=CLEAN | {"DS_ACCELERATOR": "cpu"} | environ,
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    return run


BAD = {
    "typo": ["train.lrr=1"],
    "option": ["model=lama_8b"],
    "type": ["train.lr=abc"],
    "range": ["train.micro_batch_size=0"],
    "missing": ["data=text"],
    "grammar": ["a=["],
    "plan": ["parallel=tp2_pp2"],
    "flag": ["--frobnicate"],
    "interpolation": ["run.experiment=${modl.name}"],
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_configuration_ends_with_code_2_one_short_line_and_no_traceback(call, name):
    done = call(*BAD[name])
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


@pytest.mark.alone
def test_a_bad_configuration_ends_in_under_two_seconds(call):
    def seconds() -> float:
        start = time.perf_counter()
        assert call("parallel=tp2_pp2", "zero=stage2", "train.lr=-1").returncode == 2
        return time.perf_counter() - start

    assert min(seconds() for _ in range(3)) < 2.0  # the best of three: other programs may use the machine


def test_problems_of_numbers_and_of_the_plan_come_together(call):
    lines = call("parallel=tp2_pp2", "zero=stage2", "train.lr=-1").stderr.splitlines()
    assert [any(word in line for line in lines) for word in ("train.lr=-1", "zero.stage=2", "1 rank runs")] == [
        True
    ] * 3


def test_only_rank_0_speaks_and_the_others_leave_with_code_2(call):
    first = call("parallel=tp8_pp8", RANK="0", WORLD_SIZE="2")
    second = call("parallel=tp8_pp8", RANK="1", WORLD_SIZE="2")
    assert first.returncode == second.returncode == 2
    assert "2 ranks run" in first.stderr and second.stderr == ""


RANK_0 = {"RANK": "0", "WORLD_SIZE": "2"}
SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not below WORLD_SIZE=2; ranks are 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "many"}, "WORLD_SIZE='many' is not a number"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "srun started 8 tasks (SLURM_STEP_NUM_TASKS) without RANK"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun started 2 tasks (OMPI_COMM_WORLD_SIZE) without RANK"),
        (RANK_0 | SRUN | {"SLURM_PROCID": "1"}, "srun started 2 tasks, several on a host, and each started ranks of"),
        (RANK_0 | MPIRUN | {"OMPI_COMM_WORLD_RANK": "1"}, "mpirun started 2 tasks, several on a host, and each"),
    ],
)
def test_ranks_that_no_world_has_are_refused(call, environ, line):
    done = call(**environ)
    assert done.returncode == 2 and line in done.stderr


@pytest.mark.parametrize(
    "environ",
    [
        SRUN | {"SLURM_PROCID": "0"},  # a task that is a rank
        SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_NODES": "2"},  # a task a host
        MPIRUN | {"OMPI_COMM_WORLD_RANK": "0"},
    ],
)
def test_ranks_of_slurms_and_mpis_own_tasks_run(call, environ):
    assert call("parallel.tp=2", **RANK_0, **environ).returncode == 0


@pytest.mark.parametrize("spelling", [["--local_rank=0"], ["--local-rank=0"], ["--local_rank", "0"], []])
def test_launcher_arguments_are_ignored_and_torch_is_not_imported_before_the_entry(call, spelling):
    done = call(*spelling, "train.lr=0.25")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0.25 1 ")


def test_any_working_directory_serves_and_hydra_writes_nothing_there(call, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = call(cwd=elsewhere)
    assert done.returncode == 0 and done.stdout.split()[-1] == str(elsewhere)
    assert list(elsewhere.iterdir()) == []


def test_ranks_share_the_cores_of_a_cpu(call):
    cores = len(os.sched_getaffinity(0))
    world = dict(RANK="0", WORLD_SIZE="4", LOCAL_SIZE="4")
    assert call(**world).stdout.split()[2] == str(max(1, cores // 4))
    assert call(**world, OMP_NUM_THREADS="5").stdout.split()[2] == "5"


def test_the_entrys_code_is_returned_and_ctrl_c_is_130(call):
    assert call("run.experiment=fails").returncode == 7
    assert call("run.experiment=interrupted").returncode == 130


def test_help_is_a_page_of_groups_and_of_every_knob_with_its_sentence(call):
    done = call("--help")
    assert done.returncode == 0 and done.stderr == ""
    for text in ("tp2_pp2", "llama_8b", "train.lr = 0.0003", "peak learning rate", "parallel.schedule = 1f1b", "--cfg"):
        assert text in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) < 180


def test_cfg_job_prints_the_composed_config_as_yaml(call):
    import yaml

    done = call("--cfg", "job", "train.lr=0.25", "parallel=tp2_pp2")
    config = yaml.safe_load(done.stdout)
    assert done.returncode == 0 and config["train"]["lr"] == 0.25 and config["parallel"]["schedule"] == "1f1b"
    assert call("train.lr=0.25", "--cfg", "job", "parallel=tp2_pp2").stdout == done.stdout
    assert call("--cfg", "job", RANK="1", WORLD_SIZE="2").stdout == ""


def test_a_typo_before_cfg_job_is_named_too(call):
    done = call("--cfg", "job", "train.lrr=1")
    assert done.returncode == 2 and "did you mean train.lr?" in done.stderr


def test_flags_of_hydras_that_exclude_each_other_are_a_line(call):
    for other in (["--cfg", "job"], ["--info", "searchpath"], ["--shell-completion", "query=bash"], ["--run"]):
        done = call("-m", *other, "train.lr=0.5,0.25")
        assert done.returncode == 2 and done.stdout == "", done.stderr
        assert done.stderr.count("\n") == 1 and "--multirun" in done.stderr and other[0] in done.stderr


def test_info_shows_the_search_path(call):
    assert str(ROOT / "conf") in call("--info", "searchpath").stdout


def test_tab_completion_offers_groups_and_options(call):
    done = call("--shell-completion", "query=bash", COMP_LINE="python recipe.py model=llama_7", COMP_POINT="31")
    assert "model=llama_70b" in done.stdout


def test_multirun_runs_each_job_in_its_own_process_and_returns_the_worst_code(call, tmp_path):
    done = call("-m", "run.experiment=fails,fine", "train.lr=0.5")
    assert [line.split()[0] for line in done.stdout.splitlines() if line.startswith("0.")] == ["0.5", "0.5"]
    assert done.returncode == 7 and "1 of 2 jobs succeeded" in done.stdout


def test_multirun_inside_a_process_group_is_refused(call):
    done = call("-m", "train.lr=0.5,0.25", RANK="0", WORLD_SIZE="2")
    assert done.returncode == 2
    assert done.stderr == "error: -m would run every job inside each of 2 ranks; start one launcher a job instead\n"


def test_torchruns_restarts_need_a_store_that_does_not_outlive_the_ranks(call):
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    done = call(TORCHELASTIC_MAX_RESTARTS="1", **agent)
    assert done.returncode == 2 and "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun" in done.stderr
    assert call(TORCHELASTIC_MAX_RESTARTS="0", **agent).returncode == 0
    assert call(TORCHELASTIC_MAX_RESTARTS="1", TORCHELASTIC_USE_AGENT_STORE="False").returncode == 0
