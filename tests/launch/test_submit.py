"""launch/submit.py with a fake sbatch: what it submits, and what it refuses before."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from conf.cli import compose_config
from conf.load import to_plain
from launch import submit
from telemetry.run_folder import write_json

RECIPE = "recipes/pretrain.py"


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """(code, stdout, stderr), and the words that sbatch got."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sbatch").write_text('#!/bin/bash\nprintf "%s\\0" "$@" > words; echo "17;cluster"; exit ${FAILS:-0}\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["submit.py", *arguments])
        code = submit.main()
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def words() -> list[str]:
    return Path("words").read_text().split("\0")[:-1] if Path("words").exists() else []


def test_one_job_is_submitted_with_its_words_intact(call):
    code, out, _ = call(
        "--sbatch", "-N 2 -t 4:00:00 --comment 'a b'", RECIPE, "parallel=tp1_pp2", "telemetry.wandb.tags=[a b]"
    )
    assert code == 0 and out.splitlines()[-1].startswith("job 17;")
    assert words()[:6] == ["--parsable", "-N", "2", "-t", "4:00:00", "--comment"] and words()[6] == "a b"
    assert words()[7].endswith("launch/slurm.sbatch") and words()[-2:] == [
        "parallel=tp1_pp2",
        "telemetry.wandb.tags=[a b]",
    ]


@pytest.mark.parametrize("where", ["before", "behind"])
def test_a_sweep_is_one_array_job_whose_words_are_in_a_file(call, where):
    front, behind = (["-m"], []) if where == "before" else ([], ["-m"])
    code, _, _ = call(
        "--array-limit",
        "2",
        "--id",
        "s",
        *front,
        RECIPE,
        *behind,
        "parallel=tp1_pp2,tp2_pp1",
        "train.sample_prompt='$a b'",
    )
    assert code == 0
    assert words()[:2] == ["--parsable", "--array=0-1%2"]
    assert words()[-3:-1] == ["--jobs", str(Path.cwd() / "slurm-s.json")] and words()[-1].endswith(RECIPE)
    jobs = json.loads(Path("slurm-s.json").read_text())
    assert [job[0] for job in jobs] == ["parallel=tp1_pp2", "parallel=tp2_pp1"]
    assert all("train.sample_prompt='$a b'" in job and "run.experiment=s" in job for job in jobs)
    assert [next(word for word in job if word.startswith("run.id=")) for job in jobs] == ["run.id=s-00", "run.id=s-01"]


def test_help_says_what_it_does(call):
    code, out, err = call("--help")
    assert (code, err) == (0, "") and "--array-limit" in out and out.startswith("Submit a recipe to Slurm")


def test_options_of_sbatch_that_no_shell_could_read_are_a_line(call):
    code, _, err = call("--sbatch", "-N 1 --comment 'a", RECIPE)
    assert code == 2 and err == "launch/submit.py: --sbatch -N 1 --comment 'a: No closing quotation; close its quotes\n"


def test_a_dry_run_prints_and_writes_nothing(call, monkeypatch, tmp_path):
    monkeypatch.setenv("DRY_RUN", "1")
    code, out, _ = call("--id", "s", "-m", RECIPE, "train.lr=1e-4,3e-4")
    assert code == 0 and out.startswith("sbatch --parsable --array=0-1 ") and "task 1: train.lr=0.0003" in out
    assert words() == [] and not (tmp_path / "slurm-s.json").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "usage: python launch/submit.py"),
        (["--nope", RECIPE], "option --nope not recognized"),
        (["recipes/nothing.py"], "there is no recipe recipes/nothing.py"),
        ([RECIPE, "train.lrr=1"], "train.lrr is not a knob; did you mean train.lr?"),
        (
            ["--sbatch", "-N 3 --ntasks-per-node=1 --gpus-per-node=1", RECIPE, "parallel=tp2"],
            "does not divide the 3 slots",
        ),
        (["--sbatch", "-N 99999999999 --ntasks-per-node=9", RECIPE], "--nodes 99999999999: no cluster has so many"),
        (["--sbatch", "-N2 -n6 --gres=gpu:a100:8", RECIPE], "host 0 has 3 tasks and 8 GPUs"),
        (["--sbatch", "--nodes=2 --gpus-per-node=8", RECIPE, "train.global_batch_size=8"], "train.global_batch_size=8"),
        (["-m", "--sbatch", "-n 4", RECIPE, "parallel.tp=2,3"], "job 1 (parallel.tp=3): parallel.tp=3"),
        (["--array-limit", "2", RECIPE], "are for a sweep; add -m"),
        (["-m", "--array-limit", "0", RECIPE], "--array-limit 0 is not a number of jobs"),
        (["-m", "--id", "../x", RECIPE], "--id ../x is no name of a folder"),
        ([RECIPE, "train.lr=1e-4,3e-4"], "-m for one run of each"),
    ],
)
def test_what_cannot_be_ends_with_code_2_before_anything_is_submitted(call, arguments, line):
    code, _, err = call(*arguments)
    assert code == 2 and line in err and words() == []
    assert all(one.startswith("launch/submit.py: ") for one in err.splitlines())


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        (["-N", "2", "--ntasks-per-node=8"], 16),
        (["-N", "2", "-n", "4"], 4),
        (["-n4"], 4),
        (["--nodes=2-4", "--gpus-per-node=h100:8"], 16),
        (["-N", "2", "-G", "16"], 16),
        (["--gres=gpu:4", "-p", "gpu"], 4),
        (["-p", "gpu"], 1),
    ],
)
def test_the_ranks_asked_for_are_read_from_sbatchs_options(options, ranks):
    from launch.slurm_layout import layout

    hosts, environ = submit.asked(options)
    assert sum(layout(environ, hosts, compose_config([])).ranks) == ranks


def test_sbatchs_code_is_passed_on_and_another_sweep_is_not_overwritten(call, monkeypatch):
    monkeypatch.setenv("FAILS", "1")
    assert call(RECIPE)[0] == 1
    monkeypatch.setenv("FAILS", "0")
    assert call("--id", "s", "-m", RECIPE, "train.lr=1e-4,3e-4")[0] == 0
    assert call("--id", "s", "-m", RECIPE, "train.lr=1e-4,3e-4")[0] == 0  # the same again goes on with its runs
    code, _, err = call("--id", "s", "-m", RECIPE, "train.lr=1e-4,2e-4")
    assert code == 2 and "slurm-s.json holds another sweep" in err


SWEEP = ["--id", "s", "-m", RECIPE, "train.lr=1e-4,2e-4,3e-4,4e-4,5e-4,6e-4"]


def complete(*numbers: int) -> None:
    """Runs of SWEEP as another start, by local.sh or in another folder of code, leaves them."""
    for number in numbers:
        folder = Path("runs") / "s" / f"s-{number:02d}"
        folder.mkdir(parents=True)
        (folder / "complete.json").write_text("{}")
        config = to_plain(compose_config([f"train.lr={number + 1}e-4", "run.experiment=s", "run.dir=/else/where"]))
        write_json(folder / "config.json", config | {"of_another_version": 1})


def test_a_sweep_submitted_again_leaves_out_the_runs_that_are_complete(call):
    assert call(*SWEEP)[0] == 0
    before = json.loads(Path("slurm-s.json").read_text())
    complete(1, 2)
    (Path("runs") / "s" / "s-04").mkdir()  # began
    code, out, _ = call("--array-limit", "2", *SWEEP)
    assert code == 0 and words()[1] == "--array=0,3-5%2"
    assert out.startswith("s-01 is finished already\ns-02 is finished already\nsbatch ")
    assert [line.split(":")[0] for line in out.splitlines() if line.startswith("task ")] == [
        "task 0", "task 3", "task 4", "task 5",
    ]  # fmt: skip
    assert json.loads(Path("slurm-s.json").read_text()) == before  # a task's number is a place in it


def test_a_sweep_whose_runs_are_all_complete_submits_nothing(call):
    complete(*range(6))
    code, out, _ = call(*SWEEP)
    assert code == 0 and words() == []
    assert out.splitlines()[-1] == "all 6 jobs of s are finished; nothing is submitted"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["train.lr=1e-4,5e-4,6e-4"],
            "job 1: the finished run {folder} is another: train.lr was 0.0002 and is 0.0005; choose another --id (2",
        ),
        (
            ["train.lr=2e-4,2e-4", "checkpoint.interval=7"],
            "job 0: the finished run {folder} is another: train.lr was 0.0001 and is 0.0002, checkpoint.interval was ",
        ),
        (
            ["train.lr=1e-4,2e-4", "data.sources=[{path: a},{path: b}]"],
            "job 0: the finished run {folder} is another: data.sources was ",
        ),
    ],
)
def test_finished_runs_of_another_sweep_of_that_name_are_not_taken_for_this_ones(call, words, line):
    """Without slurm-s.json: it is gone, or they are launch/sweep.py's."""
    complete(0, 1, 2)
    number = line.partition(":")[0][-1]
    code, out, err = call("--id", "s", "-m", RECIPE, *words)
    folder = Path("runs").absolute() / "s" / f"s-0{number}"
    assert (code, out) == (2, "") and err.startswith(f"launch/submit.py: {line.format(folder=folder)}"), err
    assert len(err.splitlines()) == 1


def test_a_finished_run_whose_configuration_is_gone_is_a_line(call):
    complete(0)
    (Path("runs") / "s" / "s-00" / "config.json").unlink()
    code, _, err = call(*SWEEP)
    assert code == 2 and len(err.splitlines()) == 1 and "is of a finished run, but its config.json: [Errno 2]" in err


@pytest.mark.parametrize(
    ("numbers", "text"), [([0], "0"), ([0, 1], "0-1"), ([0, 3, 4, 5], "0,3-5"), ([1, 3, 5], "1,3,5")]
)
def test_the_tasks_of_an_array_are_written_as_sbatch_reads_them(numbers, text):
    assert submit.ranges(numbers) == text


def test_a_folder_of_more_groups_reaches_the_jobs(call, tmp_path):
    (tmp_path / "more" / "model").mkdir(parents=True)
    (tmp_path / "more" / "model" / "mine.yaml").write_text("defaults:\n  - llama_tiny\nnum_layers: 2\n")
    code, _, err = call("-m", RECIPE, "--config-dir", "more", "model=mine,llama_tiny")
    assert code == 0, err
    assert words()[-2:] == ["--config-dir", "more"]
