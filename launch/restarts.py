"""What a failed run is started again as: after which codes, on which hosts, as which run.

Never after the codes of `FINAL`. Hosts: those that answer, in the hostfile's order; one that ended an attempt by its
failure is taken again only where the others are too few. The run: the one that this launch began, found by its record,
so that a run that failed before its first checkpoint keeps its id too. Not here: the plan (replan.py), and how hosts
are asked and ranks are started (multinode.py).

    python -m launch.restarts LAUNCH_ID OVERRIDES...      for launch/local.sh: prints that run's id
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from conf import interrupts

    interrupts.while_imports_run()

from conf.cli import compose_config, parse_flags
from conf.hostfile import Slots, ranks
from conf.load import ConfigError
from conf.schema import Config, RunConfig
from launch.ask import Asked
from launch.replan import Planned, described, planned
from launch.watch import Ended, Job, end_left, say
from parallel.plan import PlanError
from telemetry import jsonl
from telemetry.run_folder import run_folder_path, utc_now, write_json
from telemetry.timeline import Timeline

FINAL = (0, 2, 75, 76, 130, 143)  # done, refused, stopped on request or by an alert, interrupted, terminated
LEASE_S = 90.0  # NFS gives up the lock of a host that is dead


@dataclass(frozen=True)
class Policy:
    """What the user allows. hosts: how many to use; overrides: the recipe's."""

    hosts: int
    restarts: int
    replan: bool
    overrides: tuple[str, ...]


Start = Callable[[Planned, Sequence[str], int, Mapping[str, Any] | None], tuple[Job, Ended]]


def run(config: Config, first: Slots, policy: Policy, *, ask: Callable[[], Asked], start: Start) -> int:
    """The exit code of the last attempt. start: (plan, overrides, number of the restart, its record)."""
    now = Planned(first, (), {}, "configuration", "as configured")
    story = History(config, most=ranks(first), told=failure_of(run_of(config.run, None)))
    story.add(*start(now, policy.overrides, 0, None), now)
    for number in range(1, policy.restarts + 1):
        if story.is_final:
            break
        say(f"exit code {story.last.code}; restart {number} of {policy.restarts}")
        try:
            now, record = story.next(ask(), policy, number)
        except (ConfigError, PlanError) as error:
            say(f"{'; '.join(error.problems)}; not started again")
            break
        try:
            story.add(*start(now, [*story.overrides(policy.overrides), *now.overrides], number, record), now)
        except ConfigError as error:  # a host went between the question and the start
            say("; ".join(error.problems))
    return story.last.code


def first_hosts(asked: Asked, count: int) -> Slots:
    """The first that answer. ConfigError where they are too few."""
    hosts = pick(asked.hosts, answering=asked.answering, count=count, failures={})
    if len(hosts) < count:
        raise ConfigError([*asked.why_not, f"--hosts {count} but {len(hosts)} answer"])
    for line in asked.why_not:
        say(f"{line}; it is passed over")
    return hosts


def pick(hosts: Slots, *, answering: Sequence[str], count: int, failures: Mapping[str, int]) -> Slots:
    """At most `count` hosts that answer, in the hostfile's order; those that failed least first."""
    known = sorted((host for host in hosts if host in answering), key=lambda host: failures.get(host, 0))
    return {host: slots for host, slots in hosts.items() if host in known[:count]}


def run_of(run: RunConfig, launch: str | None) -> Path | None:
    """The folder of the run that has this id, else that a launch began or went on with; None where there is none."""
    if run.id is not None:
        folder = run_folder_path(run, run.id)
        return folder if folder.is_dir() else None
    if launch is None:
        return None
    starts = run_folder_path(run, ".").glob("*/starts/*.json")
    for path in sorted(starts, key=lambda path: path.stat().st_mtime, reverse=True):
        if json.loads(path.read_text()).get("identity", {}).get("launch") == launch:
            return path.parents[1]
    return None


def wait_until_free(folder: Path, *, seconds: float) -> bool:
    """Whether nobody holds the run's folder: rank 0 on a host that is cut off holds it until that host ends it."""
    deadline = time.monotonic() + seconds
    with (folder / "run.lock").open("r+") as lock:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(1.0)


@dataclass
class History:
    """What this launch has been through. most: ranks of the first attempt; failures: how often a host ended one."""

    config: Config
    most: int
    told: dict[str, Any]  # failed.json as the attempt before left it
    folder: Path | None = None  # of the run
    before: Planned | None = None
    last: Ended = field(default_factory=Ended)
    failures: Counter[str] = field(default_factory=Counter)
    left: list[tuple[Job, list[str]]] = field(default_factory=list)  # where ranks may live on

    @property
    def is_final(self) -> bool:
        return self.last.code in FINAL or bool(self.last.requests)

    def add(self, job: Job, ended: Ended, plan: Planned) -> None:
        """An attempt that has ended."""
        self.before, self.last = plan, ended
        self.folder = self.folder or run_of(self.config.run, job.launch)
        if ended.unreached:
            self.left.append((job, ended.unreached))
        if self.is_final:
            return
        told = failure_of(self.folder)  # nothing, where the attempt removed what the one before it left
        if told in ({}, self.told) and self.folder is not None:
            told = _tell(self.folder, job, ended)
        self.told = told
        self.failures.update(ended.culprits or _host_of(told.get("rank"), job))

    def next(self, asked: Asked, policy: Policy, number: int) -> tuple[Planned, dict[str, Any]]:
        """The plan of a restart and its record. ConfigError where there is none."""
        self.end_left(asked.answering)
        hosts = pick(asked.hosts, answering=asked.answering, count=policy.hosts, failures=self.failures)
        silent = "; ".join(asked.why_not)
        if not hosts:
            raise ConfigError([f"no host answers: {silent}"])
        if not policy.replan and ranks(hosts) < self.most:
            left = f"{ranks(hosts)} of {self.most} ranks are left on {', '.join(hosts)} (--no-replan)"
            raise ConfigError([left + (f"; {silent}" if silent else "")])
        now = planned(self.config, hosts, most=self.most, device=asked.device)
        self._wait_until_free()
        unused = ranks(hosts) - ranks(now.hosts)
        say(
            f"restart {number} on {', '.join(now.hosts)}: {now.plan['label']}, {now.why}"
            + (f"; {unused} slots stay idle" if unused else "")
            + (f"; {silent}" if silent else "")
        )
        return now, self._record(now, number, policy.restarts, asked.silent, asked.device)

    def end_left(self, answering: Sequence[str]) -> None:
        """On hosts that were out of reach and are back."""
        kept = []
        for job, hosts in self.left:
            back = [host for host in hosts if host in answering]
            away = [host for host in hosts if host not in answering] + (end_left(job, back) if back else [])
            kept += [(job, away)] if away else []
        self.left = kept

    def overrides(self, given: Sequence[str]) -> list[str]:
        """The user's, made to go on with the run that was begun."""
        if self.folder is None:
            return list(given)
        kept = [word for word in given if not word.startswith(("resume=", "run.id="))]
        return [*kept, "resume=auto", f"run.id={self.folder.name}"]

    def _wait_until_free(self) -> None:
        """Rank 0 on a host that is cut off holds the run's folder until its guard ends it."""
        if self.folder is None or not self.left:
            return
        seconds = max(LEASE_S, *(job.alone_s for job, _ in self.left)) + 10.0
        if not wait_until_free(self.folder, seconds=seconds):
            raise ConfigError([f"run {self.folder.name} is still held by {(self.folder / 'run.lock').read_text()}"])

    def _record(self, now: Planned, number: int, of: int, silent: Mapping[str, str], device: str) -> dict[str, Any]:
        """For the run's timeline. silent: hosts that do not answer, and why."""
        before = self.before
        assert before is not None
        return {
            "number": number, "of": of, "code": self.last.code, "reason": self.last.why,
            "failed": self.last.culprits, "not_answering": dict(silent),
            "hosts_before": _counted(before.hosts), "hosts": _counted(now.hosts),
            "plan_before": before.plan or described(self.config, before.hosts, device=device), "plan": now.plan,
            "chosen_by": now.chosen_by, "why": now.why,
        }  # fmt: skip


def _counted(hosts: Slots) -> dict[str, int]:
    return {host: len(slots) for host, slots in hosts.items()}


def failure_of(folder: Path | None) -> dict[str, Any]:
    """What the ranks themselves said of it; nothing where they had no time to, or to end the line."""
    path = folder / "failed.json" if folder is not None else None
    return jsonl.parsed(path.read_text()) or {} if path is not None and path.exists() else {}


def _host_of(rank: int | None, job: Job) -> list[str]:
    every = [host for host, count in zip(job.hosts, job.slots, strict=True) for _ in range(count)]
    return [] if rank is None else [every[rank]]


def _tell(folder: Path, job: Job, ended: Ended) -> dict[str, Any]:
    """failed.json and the end on the timeline, where no rank could write them."""
    host = next((host for host in ended.culprits if host in job.hosts), None)
    rank = None if host is None else sum(job.slots[: job.hosts.index(host)])
    told = {"rank": rank, "error": ended.why, "time": utc_now()}
    outcome = "host lost" if ended.is_host_lost else "rank lost" if ended.culprits else "launcher lost"
    write_json(folder / "failed.json", told)
    Timeline(folder / "timeline.jsonl").add(
        "end", step=_last_step(folder), outcome=outcome, host=host, rank=rank, error=ended.why
    )
    return told


def _last_step(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open() as file:
        last = deque(file, maxlen=2)  # the last line may be torn
    return max((row["step"] for row in map(jsonl.parsed, last) if row is not None), default=0)


def main() -> int:
    flags = parse_flags(sys.argv[2:])
    folder = run_of(compose_config(flags.overrides, config_dir=flags.config_dir).run, sys.argv[1])
    if folder is not None:
        print(folder.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
