"""launch/local.sh with small recipes: what it prints, its codes, and that nothing is left running."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "local.sh"
RECIPE = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from conf.cli import main

def run(config, plan):
    rank = int(os.environ["RANK"])
    line = f"rank {{rank}} of {{plan.world_size}} threads {{os.environ['OMP_NUM_THREADS']}}\\n"
    os.write(1, line.encode())  # at once: print() writes piecewise, and the ranks share the pipe
    open(f"started-{{rank}}", "w").close()
    if config.run.experiment == "dies" and rank == 1:
        os._exit(3)
    if config.run.experiment != "ends":
        time.sleep(60)

if __name__ == "__main__":
    main(run)
"""
CLEAN = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}


@pytest.fixture
def start(tmp_path):
    (tmp_path / "recipe.py").write_text(RECIPE)
    started = []

    def run(*arguments: str, **environ: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [SCRIPT, *arguments],
            cwd=tmp_path, env=CLEAN | {"DS_ACCELERATOR": "cpu"} | environ, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()


@pytest.fixture
def call(start):
    def run(*arguments: str, **environ: str) -> tuple[int, str, str]:
        process = start(*arguments, **environ)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    return run


def wait_until(true, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.1)


def processes_in(folder: Path) -> dict[int, str]:
    """Process id -> command line of what runs in this test's folder (a dead process has no folder)."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(place / "cwd") == str(folder):
                found[int(place.name)] = (place / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it ended meanwhile, or is another user's
            continue
    return found


def test_a_dry_run_prints_the_quoted_command_and_starts_nothing(call, tmp_path):
    code, out, _ = call("recipe.py", "data.sources=[{path: 'a b'}]", "train.lr=0.1", DRY_RUN="1", MASTER_PORT="29876")
    assert code == 0
    assert "--num_gpus 1 " in out and "--master_port 29876" in out and "train.lr=0.1" in out
    assert r"data.sources=\[\{path:\ \'a\ b\'\}\]" in out and not (tmp_path / "started-0").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["-n", "3", "recipes/pretrain.py", "parallel=tp2"], "error: 3 ranks run, not a multiple of parallel.tp=2"),
        (["recipes/finetune.py", "parallel.tp=3"], "error: parallel.tp=3 does not divide model.num_attention_heads="),
        (["-n", "2", "recipes/generate.py", "initialize_from=no"], "error: initialize_from=no: "),
        (["recipes/evaluate.py"], "error: initialize_from has no value; name the weights: "),
        (["-n", "2", "recipe.py", "trian.lr=1"], "error: trian.lr is not a knob; did you mean train.lr?"),
        (["-n", "1", "recipe.py", b'train.sample_prompt="a\xffb"'], "error: cannot read 'train.sample_prompt=\"a?b\"'"),
    ],
)
def test_a_command_that_cannot_run_is_refused_before_anything_starts(call, words, line):
    for dry in ("0", "1"):
        code, out, err = call(*words, DRY_RUN=dry)
        assert (code, out) == (2, "") and err.startswith(line) and all(
            one.startswith("error: ") for one in err.splitlines()
        )  # fmt: skip


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_started_several_times_by_a_launcher_it_starts_no_run(call, name):
    """Case F6: by srun over two hosts, each would train the same run."""
    code, out, err = call("-n", "1", "recipe.py", **{name: "2"})
    assert (code, out) == (2, "") and f"srun or mpirun started it 2 times ({name}), each a run of its own; " in err
    assert call("-n", "1", "recipe.py", DRY_RUN="1", **{name: "1"})[0] == 0


def test_a_question_to_the_recipe_is_no_run(call):
    assert call("-n", "3", "recipes/pretrain.py", "parallel=tp2", "--cfg", "job", DRY_RUN="1")[0] == 0


def test_without_n_the_plan_says_how_many_ranks(call):
    assert "--num_gpus 4 " in call("recipe.py", "parallel=tp2_pp2", DRY_RUN="1")[1]


def test_a_recipe_is_found_from_any_folder(call):
    assert f"{ROOT}/recipes/pretrain.py" in call("-n", "1", "recipes/pretrain.py", DRY_RUN="1")[1]


@pytest.mark.parametrize("port", ["abc", "80x", "99999", "-1", "0"])
def test_a_port_that_is_none_ends_with_code_2_and_its_name(call, port):
    code, out, err = call("-n", "2", "recipe.py", MASTER_PORT=port)
    assert code == 2 and f"MASTER_PORT={port} is not a port; give 1 to 65535, or unset it" in err and out == ""


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["-n", "none", "recipe.py"], "-n none is not a number of ranks"),
        (["-n", "99999", "recipe.py"], "-n 99999 is not a number of ranks; give 1 to 9999"),
        (["nothing.py"], "there is no recipe nothing.py"),
        ([], "usage: launch/local.sh [-n RANKS] [-r RESTARTS] RECIPE OVERRIDES..."),
        (["recipe.py", "train.lrr=1"], "train.lrr is not a knob; did you mean train.lr?"),
    ],
)
def test_bad_arguments_end_with_code_2_before_anything_starts(call, arguments, line):
    code, out, err = call(*arguments)
    assert code == 2 and line in err and "deepspeed" not in out


def test_a_port_in_use_is_named_and_a_free_one_is_found(call):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, _, err = call("-n", "1", "recipe.py", DRY_RUN="1", MASTER_PORT=port)
        assert code != 0 and f"MASTER_PORT={port} cannot be used" in err
        assert f"--master_port {port} " not in call("-n", "1", "recipe.py", DRY_RUN="1")[1]


def test_all_ranks_run_share_the_cores_and_the_code_is_0(call):
    code, out, err = call("-n", "2", "recipe.py", "run.experiment=ends")
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert code == 0, err
    assert sorted(line for line in out.splitlines() if line.startswith("rank")) == [
        f"rank {rank} of 2 threads {threads}" for rank in range(2)
    ]


def test_a_rank_that_dies_ends_the_run_with_its_code_and_leaves_no_rank(call, tmp_path):
    code, _, _ = call("-n", "2", "recipe.py", "run.experiment=dies")
    assert code == 3 and processes_in(tmp_path) == {}


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_ends_all_ranks(start, tmp_path, number, code):
    process = start("-n", "2", "recipe.py", "run.experiment=sleeps")
    wait_until(lambda: all((tmp_path / f"started-{rank}").exists() for rank in range(2)))
    process.send_signal(number)
    assert process.wait(timeout=30) == code
    wait_until(lambda: processes_in(tmp_path) == {}, seconds=5)


def test_ctrl_c_before_a_rank_runs_ends_it_at_once_in_one_line(start, tmp_path):
    """Nobody could save anything yet, and the ranks must not start all the same."""
    process = start("-n", "2", "recipe.py", "run.experiment=sleeps")
    process.stdout.readline()  # the command: DeepSpeed's launcher imports for seconds now
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "launch/local.sh: ended while no rank runs\n")
    assert processes_in(tmp_path) == {} and not (tmp_path / "started-0").exists()


def test_ctrl_c_while_it_asks_for_the_ranks_is_one_line(start):
    """It goes to all of the terminal's processes, the one that is asked too."""
    process = start("recipe.py", "parallel=tp2_pp2")
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "launch/local.sh: interrupted\n")


def test_a_killed_launcher_is_not_success_and_leaves_no_rank(start, tmp_path):
    # DeepSpeed's launcher returns 0 here: a negative return code of its per-node process is not greater than 0.
    process = start("-n", "2", "recipe.py", "run.experiment=sleeps")
    wait_until(lambda: all((tmp_path / f"started-{rank}").exists() for rank in range(2)))
    running = processes_in(tmp_path)
    (per_node,) = [pid for pid, command in running.items() if "-m deepspeed.launcher.launch" in command]
    os.kill(per_node, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "rank 0 did not finish" in err
    assert processes_in(tmp_path) == {}
