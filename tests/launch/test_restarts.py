"""What is started again, on which hosts and as which run: without hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from conf.cli import compose_config
from launch import restarts
from launch.ask import Asked
from launch.remote import Ssh
from launch.replan import Planned
from launch.restarts import Policy, pick, run_of
from launch.watch import Ended, Job

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("model=llama_tiny", "data.sequence_length=32", "parallel=tp1_pp2", "resume=never")
FILE = {f"w{number}": [0] for number in range(4)}


@pytest.mark.parametrize(
    ("answering", "count", "failures", "taken"),
    [
        (["w0", "w1", "w2", "w3"], 2, {}, ["w0", "w1"]),
        (["w0", "w2", "w3"], 2, {"w1": 1}, ["w0", "w2"]),
        (["w0", "w1", "w2", "w3"], 2, {"w1": 1}, ["w0", "w2"]),  # it answers, and a spare has failed less
        (["w0", "w1"], 2, {"w1": 1}, ["w0", "w1"]),  # it answers, and there is no other
        (["w3", "w1"], 2, {"w1": 2}, ["w1", "w3"]),  # the hostfile's order
        (["w0", "w1", "w2"], 2, {"w0": 2, "w1": 1, "w2": 1}, ["w1", "w2"]),
        (["w2"], 3, {}, ["w2"]),
        ([], 3, {}, []),
    ],
)
def test_hosts_that_answer_are_taken_in_order_and_those_that_failed_last(answering, count, failures, taken):
    assert list(pick(FILE, answering=answering, count=count, failures=failures)) == taken


class Story:
    """A launch of attempts that end as they are told; what each was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ends: Ended | int, silent: Sequence[dict[str, str]] = ()):
        self.ends, self.silent = [Ended(one) if isinstance(one, int) else one for one in ends], list(silent)
        self.given: list[tuple[list[str], list[str], Any]] = []
        self.ended_again: list[list[str]] = []
        self.before_end = lambda: None

        def end_left(job: Job, hosts: Sequence[str]) -> list[str]:
            self.ended_again.append(list(hosts))
            return []

        monkeypatch.setattr(restarts, "end_left", end_left)

    def ask(self) -> Asked:
        return Asked(FILE, self.silent.pop(0) if self.silent else {}, "cpu")

    def start(
        self, plan: Planned, words: Sequence[str], number: int, restart: Mapping[str, Any] | None
    ) -> tuple[Job, Ended]:
        self.given.append((list(plan.hosts), list(words), restart))
        hosts = tuple(plan.hosts)
        self.before_end()
        return Job(f"id-{number}", hosts, tuple(1 for _ in hosts), (), {}, Ssh("")), self.ends[number]

    def run(self, first: Sequence[str], *, allowed: int = 9, replan: bool = True) -> int:
        policy = Policy(len(first), allowed, replan, WORDS)
        hosts = {host: [0] for host in first}
        return restarts.run(compose_config(WORDS), hosts, policy, ask=self.ask, start=self.start)


@pytest.fixture
def story(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda *ends, **named: Story(monkeypatch, *ends, **named)


def test_what_fails_because_the_run_is_ended_is_no_culprit():
    ended = Ended(1, lost=["w1"])
    ended.fail("w1", 255)
    ended.is_cut = True
    ended.fail("w0", 255)
    assert ended.culprits == ["w1"]


def died(host: str, code: int = 247) -> Ended:
    found = Ended(code, why=f"{host} died")
    found.fail(host, code)
    return found


@pytest.mark.parametrize("code", restarts.FINAL)
def test_after_a_final_code_nothing_is_started_again(story, code):
    one = story(code)
    assert one.run(["w0", "w1"]) == code and len(one.given) == 1


def test_a_run_that_was_asked_to_stop_is_not_started_again_whatever_its_code(story):
    asked = Ended(1, requests=[15])
    assert story(asked).run(["w0", "w1"]) == 1


def test_a_budget_that_is_used_up_gives_the_last_code(story):
    one = story(3, 4, 5)
    assert one.run(["w0", "w1"], allowed=2) == 5 and len(one.given) == 3


def test_the_spare_takes_the_place_of_the_host_that_failed_and_the_record_says_so(story):
    one = story(died("w1"), 0)
    assert one.run(["w0", "w1"]) == 0
    assert [given[0] for given in one.given] == [["w0", "w1"], ["w0", "w2"]]
    assert one.given[0][2] is None
    record = one.given[1][2]
    assert (record["number"], record["of"], record["code"], record["failed"]) == (1, 9, 247, ["w1"])
    assert record["hosts_before"] == {"w0": 1, "w1": 1} and record["hosts"] == {"w0": 1, "w2": 1}
    assert record["plan_before"]["label"] == record["plan"]["label"] == "tp1_pp2_dp1_zero1"
    assert json.loads(json.dumps(record)) == record and record["reason"] == "w1 died"


def test_with_too_few_hosts_the_plan_changes_and_comes_back_with_them(story):
    gone = {"w3": "no answer", "w2": "no answer", "w1": "no answer"}
    one = story(died("w1"), died("w0", 3), 0, silent=[gone, {}])
    assert one.run(["w0", "w1"]) == 0
    assert [given[0] for given in one.given] == [["w0", "w1"], ["w0"], ["w2", "w3"]]
    assert "parallel.pp=1" in one.given[1][1] and one.given[2][1] == list(WORDS)
    assert one.given[1][2]["not_answering"] == gone


def test_without_replanning_fewer_ranks_end_it_with_the_ranks_code(story, capsys):
    one = story(died("w1"), silent=[{"w1": "no answer", "w2": "no answer", "w3": "no answer"}])
    assert one.run(["w0", "w1"], replan=False) == 247
    assert "1 of 2 ranks are left on w0 (--no-replan); host w1: no answer" in capsys.readouterr().err


def test_with_no_host_or_no_plan_it_ends_with_the_ranks_code_and_a_line(story, capsys):
    nobody = dict.fromkeys(FILE, "no answer")
    assert story(died("w1"), silent=[nobody]).run(["w0", "w1"]) == 247
    assert "no host answers: host w0: no answer" in capsys.readouterr().err


def test_hosts_that_were_not_reached_are_ended_as_soon_as_they_answer(story):
    cut = Ended(1, lost=["w1"], unreached=["w1"])
    one = story(cut, 3, 3, 0, silent=[{"w1": "no answer"}, {}, {}])
    assert one.run(["w0", "w1"]) == 0 and one.ended_again == [["w1"]]


def start_record(folder: Path, launch: str | None) -> None:
    (folder / "starts").mkdir(parents=True)
    (folder / "starts" / "1.json").write_text(json.dumps({"identity": {"launch": launch}}))


def test_the_run_that_the_launch_began_is_gone_on_with(story, tmp_path):
    start_record(tmp_path / "runs" / "default" / "another", "id-7")
    one = story(died("w1"), died("w0"), 0)
    made = iter((True, False, False))
    one.before_end = lambda: start_record(tmp_path / "runs" / "default" / "mine", "id-0") if next(made) else None
    assert one.run(["w0", "w1"]) == 0
    kept = [*WORDS[:-1], "resume=auto", "run.id=mine"]
    assert [given[1] for given in one.given] == [list(WORDS), kept, kept]


def test_what_the_ranks_had_no_time_to_say_is_said_for_them(story, tmp_path):
    run = tmp_path / "runs" / "default" / "mine"

    def begin() -> None:
        start_record(run, "id-0")
        (run / "metrics.jsonl").write_text('{"step": 6, "train/loss": 1.0}\n{"step": 7, "train/lo')

    lost = Ended(1, lost=["w1"], why="host w1 (rank 1) gave no sign of life for 60 s and counts as lost")
    one = story(lost)
    one.before_end = begin
    assert one.run(["w0", "w1"], allowed=0) == 1
    told = json.loads((run / "failed.json").read_text())
    (event,) = map(json.loads, (run / "timeline.jsonl").read_text().splitlines())
    assert (told["rank"], told["error"]) == (1, lost.why)
    assert (event["event"], event["outcome"], event["step"], event["host"]) == ("end", "host lost", 6, "w1")


def test_a_lost_host_is_told_though_the_attempt_removed_what_the_one_before_said(story, tmp_path):
    run = tmp_path / "runs" / "default" / "mine"
    start_record(run, "id-0")
    said = iter(('{"rank": 0, "error": "RuntimeError", "time": "now"}', None))

    def goes_on() -> None:
        (run / "failed.json").unlink(missing_ok=True)
        if (text := next(said)) is not None:
            (run / "failed.json").write_text(text)

    lost = Ended(1, lost=["w1"], why="host w1 (rank 1) gave no sign of life")
    one = story(died("w0", 1), lost)
    one.before_end = goes_on
    assert one.run(["w0", "w1"], allowed=1) == 1
    assert json.loads((run / "failed.json").read_text())["error"] == lost.why
    (event,) = map(json.loads, (run / "timeline.jsonl").read_text().splitlines())
    assert (event["event"], event["outcome"], event["host"]) == ("end", "host lost", "w1")


def test_a_host_of_the_rank_that_failed_first_is_replaced_where_codes_do_not_tell(story, tmp_path):
    run = tmp_path / "runs" / "default" / "mine"

    def begin() -> None:
        if not run.exists():
            start_record(run, "id-0")
            (run / "failed.json").write_text('{"rank": 0, "error": "RuntimeError", "time": "now"}')

    one = story(died("w1", 1), 0)
    one.before_end = begin
    assert one.run(["w0", "w1"]) == 0 and one.given[1][0] == ["w1", "w2"]


def test_a_run_is_found_by_its_id_or_by_the_launch_that_began_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start_record(tmp_path / "runs" / "default" / "a", "one")
    start_record(tmp_path / "runs" / "default" / "b", "two")
    start_record(tmp_path / "runs" / "other" / "c", "one")
    config = compose_config(["model=llama_tiny"]).run
    assert run_of(config, "two") == tmp_path / "runs" / "default" / "b" and run_of(config, "three") is None
    named = compose_config(["model=llama_tiny", "run.id=a"]).run
    assert run_of(named, None) == tmp_path / "runs" / "default" / "a"
    shown = subprocess.run(
        [sys.executable, "-m", "launch.restarts", "two", "model=llama_tiny"],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (shown.stdout, shown.returncode) == ("b\n", 0), shown.stderr
