"""launch/sweep.py over a stand-in for the launcher: which jobs run, when, under what name, and what its caller gets."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from conf.cli import compose_config
from conf.huggingface_config import huggingface_config
from launch import sweep, sweep_report, sweep_request
from tests.engine.launched import ROOT, wait_for

SWEEP = str(ROOT / "launch" / "sweep.py")
FAKE = Path(__file__).with_name("fake_local.py")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a launcher local.sh."""
    launcher = tmp_path / "local.sh"
    launcher.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} {FAKE} "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "DRY_RUN"):
        monkeypatch.delenv(name, raising=False)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def call(here, capfd, monkeypatch):
    """(code, stdout, stderr) of a sweep with id s, in this process, without the report at its end."""
    monkeypatch.setattr(sweep, "comparison", lambda folders: ["echo", *(folder.name for folder in folders)])

    def run(*words: str) -> tuple[int, str, str]:
        code = sweep.main(["--launch", "./local.sh", "--id", "s", *words])
        said = capfd.readouterr()
        return code, said.out, said.err

    return run


def events(kind: str = "") -> list[dict[str, Any]]:
    path = Path("events")
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if kind in row["kind"]]


def most_at_once(what: str) -> int:
    """The largest number of jobs (or ranks) that ran at the same time."""
    running = found = 0
    for row in sorted(events(), key=lambda row: row["time"]):
        amount = row["ranks"] if what == "ranks" else 1
        running += amount if row["kind"] == "begins" else -amount
        found = max(found, running)
    return found


def test_jobs_run_one_after_another_in_hydras_order_and_the_report_compares_them(call, here, monkeypatch):
    monkeypatch.setattr(sweep, "comparison", sweep_report.comparison)
    code, out, err = call("-m", "parallel=tp1,tp2", "seed=1,2")
    assert code == 0, err
    assert [row["run"] for row in events("begins")] == ["s-00", "s-01", "s-02", "s-03"]
    assert [row["ranks"] for row in events("begins")] == [1, 1, 2, 2] and most_at_once("jobs") == 1
    assert events("begins")[2]["words"][:2] == ["parallel=tp2", "seed=1"]
    assert [line.split() for line in out.splitlines() if line.startswith("s-02 ")][-1][-2:] == [
        "parallel=tp2",
        "seed=1",
    ]
    assert (here / "runs" / "s" / "comparison" / "report.html").exists()
    assert (here / "runs" / "s" / "s-03.log").read_text() == "step 1\n" and "\nstep 1\n" not in out


def test_a_job_that_fails_stops_no_other_and_gives_the_code(call, here):
    code, out, _ = call("seed=1,13,2")
    assert code == 3 and [row["run"] for row in events("ends")] == ["s-00", "s-01", "s-02"]
    assert "s-01 failed with code 3 after 0 s: error: it was to fail; " in out and "s-01.log" in out
    assert "s-01  failed with code 3" in out and "s-02  finished" in out


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["parallel.tp=1,4", "model.num_attention_heads=4,2"], ["job 03 (parallel.tp=4 model.num_attention_heads=2):"]),
        (["train.lr=1,-1", "seed=1,2"], ["job 02 (train.lr=-1 seed=1): train.lr=-1", "job 03 (train.lr=-1 seed=2): "]),
        (["train.lr=-1", "seed=1,2"], ["error: train.lr=-1"]),
        (["train.lrr=1,2"], ["train.lrr is not a knob"]),
        (["run.dir=a,b"], ["run.dir: the jobs of a sweep are in one folder, not 2"]),
        (["--ranks", "2", "parallel=tp1,tp2_pp2"], ["job 01 (parallel=tp2_pp2): it needs 4 ranks but --ranks gives 2"]),
        (["-n", "3", "parallel=tp2"], ["parallel.tp=2"]),
        (["-n", "none", "seed=1"], ["none is not a number"]),
        (["--at-one", "2"], ["unrecognized arguments: --at-one"]),
        (["recipes/nothing.py", "seed=1"], ["there is no recipe recipes/nothing.py"]),
        (["hydra/sweeper=ax", "seed=1"], ["hydra/sweeper=ax is not offered; use hydra/sweeper=optuna"]),
    ],
)
def test_what_cannot_be_is_told_job_by_job_and_none_starts(call, here, words, lines):
    code, out, err = call(*words)
    assert (code, out) == (2, "") and not (here / "runs").exists()
    assert len(err.splitlines()) == len(lines) and all(map(str.__contains__, err.splitlines(), lines)), err


@pytest.mark.parametrize(
    ("launch", "words", "line"),
    [
        ("./none.sh", [], "there is no launch script ./none.sh"),
        ("./local.sh -n 4", [], "-n belongs to launch/sweep.py itself"),
        ("launch/multinode.sh hosts", ["--ranks", "4"], "launch/multinode.sh knows its ranks"),
        ("", [], "--launch is empty"),
        ("./local.sh 'a", [], "--launch ./local.sh 'a: No closing quotation"),
    ],
)
def test_a_launch_script_that_cannot_be_is_refused(here, capfd, launch, words, line):
    assert sweep.main(["--launch", launch, *words, "seed=1"]) == 2 and line in capfd.readouterr().err


def test_jobs_share_the_ranks_that_there_are(call):
    code, _, err = call("--ranks", "4", "parallel=tp1_pp2,tp1,tp2_pp2,tp2")
    assert code == 0, err
    assert most_at_once("ranks") <= 4 and most_at_once("jobs") >= 2
    threads = max(1, len(os.sched_getaffinity(0)) // 4)
    assert {row["OMP_NUM_THREADS"] for row in events()} == {str(threads)}


def test_a_job_that_fits_goes_before_one_that_has_to_wait(call):
    call("--ranks", "3", "parallel=tp2,tp2_pp1,tp1")
    begun = [row["run"] for row in events("begins")]
    assert sorted(begun[:2]) == ["s-00", "s-02"] and begun[2] == "s-01"


def test_at_most_so_many_jobs_run_at_once(call):
    assert call("--at-once", "2", "seed=1,2,3")[0] == 0 and most_at_once("jobs") == 2


def test_jobs_that_run_at_once_have_gpus_of_their_own(call, monkeypatch):
    monkeypatch.setattr(sweep_request, "devices_here", lambda: ["2", "3", "6", "7"])
    assert call("--ranks", "4", "parallel=tp2,tp1", "seed=1,2")[0] == 0
    taken: dict[str, str] = {}
    for row in sorted(events(), key=lambda row: row["time"]):
        if row["kind"] == "ends":
            del taken[row["run"]]
            continue
        mine = row["CUDA_VISIBLE_DEVICES"].split(",")
        assert len(mine) == row["ranks"] and set(mine) <= {"2", "3", "6", "7"}
        assert not set(mine) & {one for others in taken.values() for one in others.split(",")}
        taken[row["run"]] = row["CUDA_VISIBLE_DEVICES"]
    assert most_at_once("jobs") >= 2
    code, _, err = call("--ranks", "5", "seed=1")
    assert code == 2 and "--ranks 5 but this machine has 4 GPUs" in err


def test_what_belongs_to_one_run_does_not_reach_all(call, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "same")
    monkeypatch.setenv("MASTER_PORT", "34001")
    call("--at-once", "2", "seed=1,2")
    assert {(row["WANDB_RUN_ID"], row["MASTER_PORT"]) for row in events()} == {(None, None)}


def test_a_dry_run_prints_every_command_and_leaves_nothing(call, here, monkeypatch):
    monkeypatch.setenv("DRY_RUN", "1")
    monkeypatch.setattr(sweep, "comparison", sweep_report.comparison)
    code, out, _ = call("-m", "seed=1,2", "telemetry.wandb.tags=[a b]")
    first, second, comparison = out.splitlines()
    assert code == 0 and "local.sh -n 1 " in first and "'telemetry.wandb.tags=[a b]'" in first and "seed=2" in second
    assert f"recipes/compare.py {here}/runs/s/s-00 {here}/runs/s/s-01 --out" in comparison
    assert sorted(path.name for path in here.iterdir()) == ["local.sh"]


def test_another_launcher_gets_the_jobs_without_a_number_of_ranks(call, here, monkeypatch):
    monkeypatch.setenv("DRY_RUN", "1")
    code, out, _ = call("--launch", "launch/multinode.sh hosts --launcher openmpi", "parallel=tp2_pp2", "seed=1,2")
    first = out.splitlines()[0]
    assert code == 0 and f"{ROOT}/launch/multinode.sh hosts --launcher openmpi {ROOT}/recipes/pretrain.py " in first
    assert " -n " not in first and first.endswith(" resume=auto")


def test_a_report_that_cannot_be_made_is_code_1_where_all_jobs_finished(call, monkeypatch):
    monkeypatch.setattr(sweep, "comparison", lambda folders: ["false"])
    assert call("seed=1")[0] == 1


def test_the_same_id_leaves_out_what_is_finished_and_other_jobs_are_refused(call):
    call("seed=1,13", "resume=never")
    code, out, _ = call("seed=1,13,2", "resume=never")
    assert code == 3 and "s-00 is finished already" in out
    assert [row["run"] for row in events("begins")] == ["s-00", "s-01", "s-01", "s-02"]
    resumes = [[word for word in row["words"] if word.startswith("resume=")] for row in events("begins")]
    assert resumes == [["resume=never"], ["resume=never"], ["resume=auto"], ["resume=never"]]
    code, _, err = call("seed=1,14", "resume=never")
    assert code == 2 and "s: job 01 was seed=13 and is seed=14; choose another --id" in err


def test_a_sweep_in_progress_has_its_folder_to_itself(here):
    with subprocess.Popen([sys.executable, SWEEP, "--launch", "./local.sh", "--id", "s", "seed=60"]) as first:
        wait_for(lambda: events("begins"), seconds=30, what="the first job")
        second = subprocess.run(
            [sys.executable, SWEEP, "--launch", "./local.sh", "--id", "s", "seed=60"], capture_output=True, text=True
        )
        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=30) == 75
    assert second.returncode == 2 and "is in use by another sweep" in second.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_one_request_lets_the_running_jobs_save_and_starts_no_other(here, number):
    command = [sys.executable, SWEEP, "--launch", "./local.sh", "--id", "s", "--at-once", "2", "seed=60,61,60,62"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        wait_for(lambda: len(events("begins")) == 3, seconds=30, what="three jobs")
        process.send_signal(number)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 75 and events("ends")[0]["run"] == "s-01"
    assert [out.count(words) for words in ("saved and stopped", "not started", "goes on")] == [4, 1, 1]
    assert not (here / "runs" / "s" / "comparison").exists()


def test_a_second_request_ends_them_at_once(here):
    command = [
        sys.executable,
        SWEEP,
        "--launch",
        "./local.sh",
        "--id",
        "s",
        "telemetry.wandb.group=slow_save",
        "seed=60",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        wait_for(lambda: events("begins"), seconds=30, what="the job")
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130


def test_no_job_runs_on_where_nobody_reads_the_output_any_more(here):
    words = ["--launch", "./local.sh", "--id", "s", "--at-once", "2", "seed=60,1"]
    with subprocess.Popen([sys.executable, SWEEP, *words], stdout=subprocess.PIPE) as process:
        wait_for(lambda: len(events("begins")) == 2, seconds=30, what="two jobs")
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=30) == 75
    assert [row["run"] for row in events("ends")] == ["s-01", "s-00"]


def test_the_last_value_of_a_run_that_was_killed_while_it_wrote_is_that_of_its_last_whole_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"validation/loss": 2.5}\n{"validation/loss": 1.')
    assert sweep_report.last_value(tmp_path, "validation/loss") == 2.5
    assert sweep_report.last_value(tmp_path / "none", "validation/loss") is None


needs_optuna = pytest.mark.skipif(
    find_spec("hydra_plugins") is None, reason="hydra-optuna-sweeper is not installed (docs/sweeps.md)"
)
SEARCH = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=5", "train.lr=tag(log, interval(1e-5, 1e-1))"]


@needs_optuna
def test_optuna_draws_jobs_from_what_the_last_ones_reached_and_the_same_command_draws_them_again(call, here):
    code, out, err = call("-m", *SEARCH, "hydra.sweeper.sampler.n_startup_trials=2", "model=llama_tiny")
    assert code == 0, err
    drawn = [float(dict(word.split("=", 1) for word in row["words"])["train.lr"]) for row in events("begins")]
    assert len(set(drawn)) == 5 and all(1e-5 <= lr <= 1e-1 for lr in drawn)
    best = min(drawn, key=lambda lr: abs(lr / 1e-3 - 1) if lr > 1e-3 else abs(1e-3 / lr - 1))  # the loss's minimum
    assert f"train.lr: {best!r}" in out and "best_value" in out
    code, out, _ = call("-m", *SEARCH, "hydra.sweeper.sampler.n_startup_trials=2", "model=llama_tiny")
    assert code == 0 and out.count("is finished already") == 5 and len(events("begins")) == 5


def model_folder(path: Path) -> str:
    path.mkdir()
    model = compose_config(["model=llama_tiny"]).model
    (path / "config.json").write_text(json.dumps(huggingface_config(model)))
    return str(path)


def test_a_model_may_be_a_folder_in_a_sweep_and_be_swept(call, here):
    one, two = model_folder(here / "one"), model_folder(here / "two")
    code, _, err = call("-m", f"model={one}", "train.lr=1e-4,3e-4")
    assert code == 0, err
    code, _, err = call("--id", "t", "-m", f"model={one},{two},llama_tiny")
    assert code == 0, err
    models = [
        word.removeprefix("model=") for row in events("begins") for word in row["words"] if word.startswith("model=")
    ]
    assert models == [one, one, one, two, "llama_tiny"]
    code, out, err = call("--id", "u", "-m", f"model={one},{here}/three", "train.lr=1e-4")
    assert (code, out) == (2, "") and f"job 01 (model={here}/three): model={here}/three: " in err


@needs_optuna
def test_a_search_takes_a_folder_as_its_model(call, here):
    folder = model_folder(here / "one")
    code, out, err = call("-m", SEARCH[0], "hydra.sweeper.n_trials=1", SEARCH[2], f"model={folder}")
    assert code == 0 and "best_value" in out, err
    assert [row["words"].count(f"model={folder}") for row in events("begins")] == [1]


@needs_optuna
def test_a_search_goes_the_way_it_is_told_and_runs_at_once_what_it_is_told(call):
    code, out, err = call("--at-once", "2", *SEARCH[:1], "hydra.sweeper.n_trials=4", "hydra.sweeper.direction=maximize",
                          "--objective", "train/loss", *SEARCH[2:])  # fmt: skip
    assert code == 0, err
    assert most_at_once("jobs") == 2 and "best_value: 9.0" in out


@needs_optuna
def test_jobs_of_a_search_that_fail_or_cannot_be_planned_stop_no_other(call):
    words = ["hydra.sweeper.n_trials=4", "seed=choice(1,13)", "parallel.tp=choice(1,3)", "--at-once", "4"]
    code, out, _ = call(*SEARCH[:1], *words)
    begun, refused = {row["run"] for row in events("begins")}, out.count(" refused: parallel.tp=3 ")
    assert len(begun) + refused == 4 and refused > 0 and code in (2, 3) and "best_value" in out
    code, out, _ = call("--id", "t", *SEARCH[:1], "hydra.sweeper.n_trials=1", "seed=choice(13)")
    assert code == 3 and "no job reached an objective" in out
    code, out, _ = call("--id", "u", *SEARCH[:1], "hydra.sweeper.n_trials=1", "seed=choice(1)", "--objective", "none")
    assert "u-00 has no none that is a number" in out


@needs_optuna
@pytest.mark.slow
def test_a_stopped_search_ends_with_75_and_a_dry_run_prints_its_first_jobs(here, call, monkeypatch):
    words = ["--launch", "./local.sh", "--id", "s", *SEARCH, "seed=60"]
    with subprocess.Popen([sys.executable, SWEEP, *words], stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: events("begins"), seconds=30, what="the first job")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 75
    assert len(events("begins")) == 1
    shutil.rmtree("runs")
    monkeypatch.setenv("DRY_RUN", "1")
    code, out, _ = call(*SEARCH)
    assert code == 0 and len(out.splitlines()) == 1 and "train.lr=0.0" in out and not Path("runs").exists()


@needs_optuna
@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("hydra.sweeper.n_trialsx=3", "hydra.sweeper.n_trialsx"),
        ("hydra.sweeper.storage=sqlite:///x.db", "hydra.sweeper.storage=sqlite:///x.db: a sweep has its own"),
        ("train.lrr=1", "train.lrr is not a knob"),
        ("train.lr=-1", "train.lr=-1"),
    ],
)
def test_a_search_that_cannot_be_is_one_line(call, word, line):
    code, _, err = call("-m", *SEARCH[:2], "seed=choice(1,2)", word)
    assert code == 2 and line in err and len(err.splitlines()) == 1, err


def test_without_the_plugin_its_installation_is_named(call, monkeypatch):
    from importlib.metadata import PackageNotFoundError

    from conf import search

    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(search, "version", version)
    code, _, err = call(*SEARCH)
    assert code == 2 and "pip install hydra-optuna-sweeper==1.3.0" in err
