"""Stopping on request and going on after a fault, through the launch script: cases F7, G2, D3 and D4."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from engine.checkpoint_folder import list_checkpoints
from tests.engine.launched import (
    BIN,
    FAULTY,
    LOCAL,
    ROOT,
    TINY,
    events_of,
    finish,
    processes_in,
    start,
    steps_of,
    wait_for,
)
from tests.telemetry.wandb_files import read, segments

pytestmark = pytest.mark.alone

LONG = [*TINY, "train.train_iters=100000", "checkpoint.interval=0"]


def stopped(tmp_path: Path, process: subprocess.Popen[str], *, says: tuple[str, ...] = ()) -> int:
    """Wait for the end of a run that was asked to stop; the step of its one checkpoint, which is its last step.

    says: whose tracebacks are no fault of ours.
    """
    run = tmp_path / "runs" / "default" / "r"
    process.wait(timeout=30)
    wait_for(lambda: not processes_in(tmp_path, str(FAULTY)), seconds=30, what="all ranks gone")
    output = (tmp_path / "output.txt").read_text()
    steps, checkpoints = steps_of(run), list_checkpoints(run / "checkpoints")
    assert [step for step, _ in checkpoints] == [steps[-1]], output
    assert [event["event"] for event in events_of(run)][-1] == "stopped on request"
    tracebacks = [text.lstrip().splitlines()[0] for text in output.split("Traceback (most recent call last):\n")[1:]]
    assert [line for line in tracebacks if not any(f"/{one}" in line for one in says)] == [], output
    return steps[-1]


SIGNALS = {
    "SIGTERM to rank 1": ("rank 1", signal.SIGTERM),
    "SIGUSR1 to rank 0": ("rank 0", signal.SIGUSR1),
    "Ctrl-C to the script": ("script", signal.SIGINT),
    "SIGTERM to the script": ("script", signal.SIGTERM),
    "SIGTERM to DeepSpeed's launcher": ("launcher", signal.SIGTERM),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if "rank 1" in name else pytest.mark.slow) for name in SIGNALS],
)
def test_a_signal_ends_the_run_after_a_saved_step(name: str, tmp_path: Path) -> None:
    """Case F7: whoever gets it, all ranks agree on the step; the code is 75; the next start goes on at +1."""
    target, number = SIGNALS[name]
    run = tmp_path / "runs" / "default" / "r"
    process = start([str(LOCAL), "-n", "2", str(FAULTY), *LONG], tmp_path, FAULT="slow")
    wait_for(lambda: len(steps_of(run)) >= 2, seconds=90, what="two steps")
    if target == "script":
        process.send_signal(number)
    elif target == "launcher":
        (launcher,) = processes_in(tmp_path, "deepspeed.launcher.launch")
        launcher.send_signal(number)
    else:
        rank = target.split()[1]
        (process_of_rank,) = processes_in(tmp_path, f"--local_rank={rank}")
        process_of_rank.send_signal(number)
    last = stopped(tmp_path, process)
    if target != "launcher":  # which returns 1 when it was ended itself
        assert process.returncode == 75
    more = [*TINY, f"train.train_iters={last + 2}"]
    code, output = finish([str(LOCAL), "-n", "2", str(FAULTY), *more], tmp_path, FAULT="none")
    assert code == 0, output
    assert steps_of(run) == list(range(1, last + 3))


RUNNERS = {
    "deepspeed": [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", "31531"],
    "torchrun": [str(BIN / "torchrun"), "--nproc-per-node", "2", "--master-port", "31532"],
    "elastic.py": [
        str(BIN / "python"), str(ROOT / "launch" / "elastic.py"), "--nproc-per-node", "2", "--master-port", "31533"
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("target", ["rank 1", "launcher"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_under_other_launchers_a_signal_ends_the_run_after_a_saved_step(
    runner: str, target: str, tmp_path: Path
) -> None:
    """Case F7: their own codes are what they are, but launch/elastic.py's."""
    run, command = tmp_path / "runs" / "default" / "r", [*RUNNERS[runner], str(FAULTY)]
    process = start([*command, *LONG], tmp_path, FAULT="slow")
    wait_for(lambda: len(steps_of(run)) >= 2, seconds=120, what="two steps")
    if target == "launcher":
        process.send_signal(signal.SIGTERM)
    else:
        ranks = processes_in(tmp_path, str(FAULTY))
        (one,) = [rank for rank in ranks if rank.environ().get("RANK") == "1"]
        one.send_signal(signal.SIGTERM)
    last = stopped(tmp_path, process, says=(f"bin/{runner}",))
    expected = {("elastic.py", "rank 1"): 75, ("elastic.py", "launcher"): 143}
    assert process.returncode == expected.get((runner, target), process.returncode) and process.returncode != 0
    more = [*TINY, f"train.train_iters={last + 2}", "resume=auto"]
    code, output = finish([*command, *more], tmp_path, FAULT="none")
    assert code == 0, output
    assert steps_of(run) == list(range(1, last + 3))


@pytest.mark.slow
def test_a_sweep_that_is_asked_to_stop_saves_its_run_and_goes_on_with_it(tmp_path: Path) -> None:
    """Case F7."""
    words = [word for word in LONG if not word.startswith("run.id=")]
    command = [str(BIN / "python"), str(ROOT / "launch" / "sweep.py"), "--id", "s", "-m", str(FAULTY), *words]
    process = start([*command, "train.lr=1e-3,1e-4"], tmp_path, FAULT="slow")
    run = tmp_path / "runs" / "s" / "s-00"
    wait_for(lambda: len(steps_of(run)) >= 2, seconds=120, what="two steps")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75
    output, saved = (tmp_path / "output.txt").read_text(), [step for step, _ in list_checkpoints(run / "checkpoints")]
    assert saved == steps_of(run)[-1:] and "s-00 saved and stopped" in output and "Traceback" not in output
    assert not (run.parent / "s-01").exists() and not processes_in(tmp_path, str(FAULTY))
    process = start([*command, "train.lr=1e-3,1e-4"], tmp_path, FAULT="slow")
    wait_for(lambda: steps_of(run)[-1] > saved[0] + 1, seconds=120, what="steps behind the checkpoint")
    assert steps_of(run) == list(range(1, len(steps_of(run)) + 1))
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
    process.wait(timeout=30)


@pytest.mark.slow
def test_a_signal_in_an_evaluation_is_obeyed_after_it(tmp_path: Path) -> None:
    long = [*LONG, "train.eval_interval=1", "train.eval_samples=800"]
    process = start([str(LOCAL), "-n", "2", str(FAULTY), *long], tmp_path, FAULT="slow")
    run = tmp_path / "runs" / "default" / "r"
    wait_for(lambda: len(steps_of(run)) >= 2, seconds=90, what="two steps")
    (rank,) = processes_in(tmp_path, "--local_rank=1")
    rank.send_signal(signal.SIGTERM)
    stopped(tmp_path, process)
    assert process.returncode == 75


@pytest.mark.slow
def test_the_same_signal_again_ends_the_run_at_once(tmp_path: Path) -> None:
    process = start([str(LOCAL), "-n", "2", str(FAULTY), *LONG], tmp_path, FAULT="slow", SLOW_S="8")
    wait_for(lambda: processes_in(tmp_path, "--local_rank=1"), seconds=60, what="ranks")
    wait_for(lambda: steps_of(tmp_path / "runs" / "default" / "r"), seconds=60, what="a step")
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=2)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=15) == 130
    assert not processes_in(tmp_path, str(FAULTY))


def test_a_killed_rank_is_restarted_from_the_checkpoint_and_wandb_goes_on(tmp_path: Path) -> None:
    """Case G2: killed before step 7 with a checkpoint at 4; the second segment has the steps 5 to 8 of the same run."""
    command = [str(LOCAL), "-n", "2", "-r", "1", str(FAULTY), *TINY, "train.train_iters=8", "checkpoint.interval=4"]
    once = str(tmp_path / "struck")
    code, output = finish(command, tmp_path, FAULT="kill", FAULT_STEP="7", FAULT_RANK="1", FAULT_ONCE=once)
    assert code == 0, output
    assert "restart 1 of 1" in output and "a rank was lost" in output
    run = tmp_path / "runs" / "default" / "r"
    assert steps_of(run) == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8]
    (first, _, first_run), (second, _, second_run) = map(read, segments(run))
    assert second_run.run_id == "r"
    # The launcher ends wandb's own process too, which may then lose what it had not written; metrics.jsonl has it all.
    assert first_run is None or first_run.run_id == "r"
    steps = [row["step"] for row in first if "train/loss" in row]
    assert steps == [1, 2, 3, 4, 5, 6][: len(steps)]
    assert [row["step"] for row in second if "train/loss" in row] == [5, 6, 7, 8]
    assert "less than current step" not in output
    assert [event["event"] for event in events_of(run) if event["event"] not in ("checkpoint", "alerts")] == [
        "start",
        "rank lost",
        "end",
        "start",
        "resume",
        "restart",
        "end",
    ]
    (again,) = [event for event in events_of(run) if event["event"] == "restart"]
    assert (again["step"], again["number"], again["of"], again["code"] != 0) == (4, 1, 1, True)
    assert (run / "complete.json").exists() and not (run / "failed.json").exists()


@pytest.mark.slow
def test_a_run_that_dies_before_its_first_checkpoint_is_restarted_as_the_same_run(tmp_path: Path) -> None:
    words = [word for word in TINY if not word.startswith("run.id=")]
    command = [str(LOCAL), "-n", "2", "-r", "1", str(FAULTY), *words, "train.train_iters=3"]
    once = str(tmp_path / "struck")
    code, output = finish(command, tmp_path, FAULT="kill", FAULT_STEP="3", FAULT_RANK="1", FAULT_ONCE=once)
    assert code == 0, output
    (run,) = (tmp_path / "runs" / "default").iterdir()
    assert steps_of(run) == [1, 2, 1, 2, 3]


def test_resume_from_a_path_that_is_not_there_writes_nothing(tmp_path: Path) -> None:
    """Case D3."""
    code, output = finish(
        [str(BIN / "python"), str(FAULTY), *TINY, "parallel.pp=1", "resume=/nope"], tmp_path, FAULT="none"
    )
    assert code == 2
    assert "error: resume=/nope: there is no complete checkpoint" in output
    assert not (tmp_path / "runs" / "default").exists()
