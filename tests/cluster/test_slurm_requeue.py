"""What ends a job of a real Slurm, or has it saved and requeued: case F7, and F5, under both ways to start ranks."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.checkpoint_folder import list_checkpoints
from tests.cluster.runs import BIN, SHOWS
from tests.cluster.slurm import SBATCH, SUBMIT, Slurm, rank_of
from tests.engine.launched import FAULTY, events_of, steps_of, wait_for

TASK_A_HOST, TASK_A_RANK = ["-N", "2"], ["-N", "2", "--ntasks-per-node=2"]
SLOW = pytest.mark.slow
PLANS = {"hosts": (TASK_A_HOST, "parallel=tp1_pp2"), "ranks": (TASK_A_RANK, "parallel=tp2_pp2")}
LONG = [
    "model=llama_tiny", "data.sequence_length=32", "train.train_iters=100000", "checkpoint.interval=0",
    "telemetry=quiet",
]  # fmt: skip


class Training:
    """A job whose steps are slow, which goes on until something ends it."""

    def __init__(self, slurm: Slurm, folder: Path, how: str, *more: str):
        self.slurm, self.folder = slurm, folder
        options, plan = PLANS[how]
        words = [*options, SBATCH, str(FAULTY), *LONG, plan, *(more or ["train.eval_interval=0"])]
        self.job = slurm.submit(words, folder, FAULT="slow")
        self.run = folder / "runs" / "default" / f"slurm-{self.job}"

    def wait_for_steps(self, count: int) -> None:
        try:
            wait_for(lambda: len(steps_of(self.run)) >= count, seconds=150, what=f"{count} steps")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from error

    @property
    def output(self) -> str:
        files = [self.folder / f"slurm-{self.job}.out", *(self.folder / f"slurm-{self.job}").glob("*.log")]
        return "\n".join(f"{file.name}:\n{file.read_text()}" for file in files if file.exists())

    def scancel(self, *options: str) -> None:
        self.slurm.run("scancel", *options, self.job)

    def goes_on(self) -> None:
        """It was requeued once, after saving its last step, and trained on from there in the same folder."""
        wait_for(lambda: self.slurm.about(self.job)["Restarts"] == "1", seconds=60, what="the requeue")
        saved = [step for step, _ in list_checkpoints(self.run / "checkpoints")]
        assert saved == steps_of(self.run)[-1:], self.output
        self.wait_for_steps(saved[0] + 2)
        assert steps_of(self.run) == list(range(1, len(steps_of(self.run)) + 1)), self.output
        assert [event["step"] for event in events_of(self.run) if event["event"] == "resume"] == saved
        assert [path.name for path in self.run.parent.iterdir()] == [self.run.name]
        assert "Traceback" not in self.output


@pytest.fixture
def train(slurm: Slurm, tmp_path: Path) -> Iterator[object]:
    yield lambda how, *more: Training(slurm, tmp_path, how, *more)
    slurm.end()


@pytest.mark.parametrize("how", ["hosts", pytest.param("ranks", marks=SLOW)])
def test_slurms_warning_to_the_job_saves_and_the_requeued_job_goes_on(train, slurm, how):
    training = train(how)
    training.wait_for_steps(2)
    training.scancel("--signal=USR1", "--batch")
    training.goes_on()
    training.scancel()  # plain: at once
    assert slurm.wait(training.job)[0] == "CANCELLED"
    wait_for(lambda: slurm.processes() == [], seconds=30, what="no process")


@SLOW
@pytest.mark.parametrize("how", PLANS)
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_one_rank_only_does_the_same(train, slurm, how, number):
    training = train(how)
    training.wait_for_steps(2)
    slurm.rank_on(slurm.hosts[1], {"hosts": 1, "ranks": 2}[how]).send_signal(number)
    training.goes_on()


@SLOW
@pytest.mark.parametrize("how", PLANS)
def test_a_warning_in_an_evaluation_is_obeyed_after_it(train, how):
    training = train(how, "train.eval_interval=1", "train.eval_samples=800")
    training.wait_for_steps(2)
    training.scancel("--signal=USR1", "--batch")
    training.goes_on()


@SLOW
@pytest.mark.parametrize("how", PLANS)
def test_a_preempted_job_saves_makes_way_and_goes_on(train, slurm, tmp_path, how):
    """Slurm's own preemption, by a job of a partition that goes before."""
    training = train(how)
    training.wait_for_steps(2)
    (tmp_path / "urgent").mkdir()
    urgent = slurm.submit(
        ["-p", "urgent", "-N", "2", "--exclusive", SBATCH, SHOWS, "parallel=tp1_pp2"], tmp_path / "urgent"
    )
    assert slurm.wait(urgent) == ("COMPLETED", 0)
    training.goes_on()


@SLOW
@pytest.mark.parametrize("how", PLANS)
def test_a_warning_before_anything_trains_requeues_too(train, slurm, how):
    training = train(how)
    wait_for(lambda: any(rank_of(process) == "0" for process in slurm.processes()), seconds=60, what="a rank")
    training.scancel("--signal=USR1", "--batch")
    wait_for(lambda: slurm.about(training.job)["Restarts"] == "1", seconds=60, what="the requeue")
    training.wait_for_steps(2)
    assert steps_of(training.run)[0] == 1


@SLOW
@pytest.mark.parametrize("how", PLANS)
def test_a_users_request_to_stop_saves_and_does_not_requeue(train, slurm, how):
    training = train(how)
    training.wait_for_steps(2)
    training.scancel("--signal=TERM", "--batch")
    assert slurm.wait(training.job) == ("FAILED", 75), training.output
    assert [step for step, _ in list_checkpoints(training.run / "checkpoints")] == steps_of(training.run)[-1:]
    assert slurm.about(training.job)["Restarts"] == "0" and slurm.processes() == []


@SLOW
@pytest.mark.parametrize("how", PLANS)
def test_a_killed_rank_ends_the_job_on_both_hosts(train, slurm, how):
    """Case F5."""
    training = train(how)
    training.wait_for_steps(2)
    slurm.rank_on(slurm.hosts[1], {"hosts": 1, "ranks": 3}[how]).kill()
    state, code = slurm.wait(training.job, seconds=90)
    assert state == "FAILED" and code not in (0, 2, 75)
    assert "a rank was lost" in (training.folder / f"slurm-{training.job}.out").read_text(), training.output
    assert slurm.processes() == []


@SLOW
def test_one_job_of_a_sweep_is_requeued_and_the_others_train_on(slurm, tmp_path):
    command = [str(BIN / "python"), SUBMIT, "--sbatch", "-N 1", "--id", "s", "-m", str(FAULTY), *LONG]
    command += ["train.eval_interval=0", "train.lr=1e-3,1e-4"]
    code, output = slurm.call(command, tmp_path, FAULT="slow")
    assert code == 0, output
    job = output.splitlines()[-1].removeprefix("job ").partition(";")[0]
    runs = [tmp_path / "runs" / "s" / f"s-0{task}" for task in (0, 1)]
    try:
        wait_for(lambda: all(len(steps_of(run)) >= 2 for run in runs), seconds=180, what="steps of both")
        slurm.run("scancel", "--signal=USR1", "--batch", f"{job}_1")
        wait_for(lambda: slurm.about(f"{job}_1")["Restarts"] == "1", seconds=60, what="the requeue")
        (saved,) = [step for step, _ in list_checkpoints(runs[1] / "checkpoints")]
        wait_for(lambda: steps_of(runs[1])[-1] > saved, seconds=180, what="its next step")
        assert steps_of(runs[1]) == list(range(1, len(steps_of(runs[1])) + 1))
        assert slurm.about(f"{job}_0")["Restarts"] == "0" and slurm.state(f"{job}_0") == "RUNNING"
    finally:
        slurm.end()
