"""Some steps of a recorded run once more: its config, plan and code, from a checkpoint, in a folder of no worth.

A replay is a run of its own through launch/local.sh and recipes/pretrain.py of the code as it was: a git worktree at
its commit, with the patch of uncommitted changes that the run kept. Its configuration is given knob by knob, so that no
YAML that changed since has a say. Nothing of the recorded run's folder is written. What cannot be played again raises
Unplayable with the reason.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from telemetry import jsonl
from telemetry.compare.differences import is_unkept
from telemetry.compare.runs import Run, RunError, Start, lives, load_run
from telemetry.redact import redacted
from telemetry.run_folder import git_changes, git_commit

ROOT = Path(__file__).resolve().parents[1]
# Groups that decide no number: where files go, what is watched, other recipes.
ASIDE = ("run", "telemetry", "checkpoint", "resume", "benchmark", "plan", "promote", "probe", "alerts")
FIXED = ("telemetry=quiet", "checkpoint.interval=0", "train.eval_interval=0", "train.sample_tokens=0")
OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "LAUNCH_MARKER")
POLL_S = 0.3
OWNER = "a replay of process "
TWICE_S = 1.5  # between two signals, so that the second counts as a second request (engine/session.py)


class Unplayable(ValueError):
    """Why a run or a mix of two cannot be played again, in one line."""


@dataclass(frozen=True)
class Code:
    """commit None: not known, this code is taken; patch: uncommitted changes."""

    commit: str | None
    patch: str | None

    @classmethod
    def of(cls, start: Start) -> Code:
        commit = start.identity.get("git_commit")
        return cls(commit.removesuffix("+changes") if commit else None, start.patch)


@dataclass(frozen=True)
class Recipe:
    """What is played: name tells replays apart; checkpoint None: from step 0; called_from: where relative paths start;
    last: the step after which it may end."""

    name: str
    config: Mapping[str, Any]
    code: Code
    ranks: int
    checkpoint: Path | None
    called_from: Path
    last: int


def ranks_of(start: Start) -> int:
    """Of the plan; without one (wandb's files) tp x pp."""
    parallel = start.config.get("parallel", {})
    return start.plan.get("world_size") or parallel.get("tp", 1) * parallel.get("pp", 1)


def called_from(run: Run) -> Path:
    """The folder in which the run was started, as far as its own place tells: else this one."""
    directory = Path(run.last.config.get("run", {}).get("dir", "runs"))
    folder = run.folder.absolute()
    above = folder.parents[len(directory.parts) + 1 : len(directory.parts) + 2]
    if not directory.is_absolute() and above and folder.parents[1] == above[0] / directory:
        return above[0]
    return Path.cwd()


def overrides(recipe: Recipe, folder: Path, *, without: Sequence[str] = ()) -> list[str]:
    """The command line of a replay whose files go under `folder`; without: knobs that its code does not have."""
    words = []
    for key, value in _knobs(recipe.config):
        if key.split(".")[0] not in ASIDE and key not in without:
            words.append(f"{key}={hydra_value(value)}")
    resume = "never" if recipe.checkpoint is None else str(recipe.checkpoint.resolve())
    where = {"run.dir": str(folder), "run.experiment": "replay", "run.id": recipe.name, "resume": resume}
    fixed = [word for word in FIXED if word.split("=")[0] not in without]
    return [*words, *fixed, *(f"{key}={hydra_value(value)}" for key, value in where.items())]


def _knobs(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """A list of anything is one knob: an override replaces it whole."""
    found = []
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            found += [(f"{name}.{key}", child) for key, child in _knobs(value)]
        else:
            found.append((name, value))
    return found


def hydra_value(value: Any) -> str:
    """As Hydra's grammar reads it back."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + found[2].replace("'", "\\'"), value)
        return f"'{escaped}'"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {hydra_value(child)}" for key, child in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(hydra_value, value)) + "]"
    return repr(value)


@dataclass
class Player:
    """with Player(folder) as play: play(recipe) -> the replay as a run. Worktrees last until the end of the block."""

    folder: Path
    timeout_s: float = 1800.0
    repository: Path = ROOT
    notes: list[str] = field(default_factory=list)
    _roots: dict[Code, Path] = field(default_factory=dict)

    def __enter__(self) -> Player:
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_stale_worktrees(self.repository)
        return self

    def __exit__(self, *error: object) -> None:
        for root in self._roots.values():
            if root != ROOT:
                _remove_worktree(self.repository, root)

    def __call__(self, recipe: Recipe) -> Run:
        root = self._root(recipe.code)
        words = overrides(recipe, self.folder)
        unknown: list[str] = []
        for _ in range(2):  # again without the knobs that code of another time does not have
            code, errors = self._launch(root, recipe, words)
            unknown = re.findall(r"^error: (\S+) is not a knob", errors, flags=re.MULTILINE)
            if not unknown:
                break
            shutil.rmtree(self._runs(recipe), ignore_errors=True)
            words = overrides(recipe, self.folder, without=unknown)
            self.notes.append(f"{recipe.name}: its code has no {', '.join(unknown)}; left out")
        try:
            run = load_run(self._runs(recipe))
        except RunError:
            raise Unplayable(f"{recipe.name} did not start: {_last_words(errors)}") from None
        if max(run.steps, default=0) < recipe.last:
            raise Unplayable(f"{recipe.name} ended with code {code} before step {recipe.last}: {_last_words(errors)}")
        return run

    def _runs(self, recipe: Recipe) -> Path:
        return self.folder / "replay" / recipe.name

    def _launch(self, root: Path, recipe: Recipe, words: Sequence[str]) -> tuple[int, str]:
        """The exit code and what it said on stderr, after the last step that is wanted or the run's own end."""
        command = [str(root / "launch" / "local.sh"), "-n", str(recipe.ranks), "recipes/pretrain.py", *words]
        environ = {key: value for key, value in os.environ.items() if key not in OF_LAUNCHERS}
        environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', '')}"
        said = self.folder / f"{recipe.name}.log"
        with said.open("w") as log:
            process = subprocess.Popen(
                command, cwd=recipe.called_from, env=environ, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                self._wait(process, self._runs(recipe) / "metrics.jsonl", recipe.last)
            finally:
                _end(process)
        return process.returncode, said.read_text()

    def _wait(self, process: subprocess.Popen[bytes], metrics: Path, last: int) -> None:
        until = time.monotonic() + self.timeout_s
        while process.poll() is None and _last_step(metrics) < last:
            if time.monotonic() > until:
                raise Unplayable(f"no step {last} within {self.timeout_s:g} s; --bisect-timeout gives it longer")
            time.sleep(POLL_S)

    def _root(self, code: Code) -> Path:
        """The folder of that code: this one where it is the same, else a worktree."""
        if code not in self._roots:
            self._roots[code] = ROOT if _is_here(code) else self._worktree(code)
        return self._roots[code]

    def _worktree(self, code: Code) -> Path:
        assert code.commit is not None
        root = self.folder / f"code-{len(self._roots)}-{code.commit[:12]}"
        if _git(self.repository, "cat-file", "-e", f"{code.commit}^{{commit}}").returncode != 0:
            raise Unplayable(f"commit {code.commit[:12]} is not in the repository {self.repository}; fetch it first")
        _git(self.repository, "worktree", "add", "--detach", str(root), code.commit)
        _git(
            self.repository,
            "worktree",
            "lock",
            "--reason",
            f"{OWNER}{os.getpid()} on {socket.gethostname()}",
            str(root),
        )
        if code.patch and _git(root, "apply", "-", text=code.patch).returncode != 0:
            _remove_worktree(self.repository, root)
            raise Unplayable(f"the patch that the run kept does not apply to its commit {code.commit[:12]}")
        return root


def remove_stale_worktrees(repository: Path) -> None:
    """Those of replays whose process was killed on this machine; one of a living process is locked and stays."""
    root = None
    for line in _git(repository, "worktree", "list", "--porcelain").stdout.splitlines():
        word, _, value = line.partition(" ")
        root = Path(value) if word == "worktree" else root
        if word == "locked" and root is not None and value.startswith(OWNER):
            process, _, host = value.removeprefix(OWNER).partition(" on ")
            if host == socket.gethostname() and not lives(int(process)):
                _remove_worktree(repository, root)
    _git(repository, "worktree", "prune")


def _remove_worktree(repository: Path, root: Path) -> None:
    """Also a locked one, and one whose files are gone already."""
    shutil.rmtree(root, ignore_errors=True)
    _git(repository, "worktree", "unlock", str(root))
    _git(repository, "worktree", "prune")


def _is_here(code: Code) -> bool:
    """Whether this checkout is that code; where the commit is not known there is no other."""
    if code.commit is None:
        return True
    here = (git_commit() or "").removesuffix("+changes")
    return here == code.commit and redacted(git_changes()).strip() == (code.patch or "").strip()


def doubts(run: Run, start: Start) -> list[str]:
    """What a replay of it cannot be sure of."""
    if start.identity.get("git_commit") is None:
        return [f"{run.name}: its commit is not known; it is replayed with the code of {ROOT}"]
    if is_unkept(start):
        return [f"{run.name}: it ran with uncommitted changes that were not kept; its commit is replayed without them"]
    return []


def _git(folder: Path, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=folder, input=text, capture_output=True, text=True, check=False)


def _last_step(metrics: Path) -> int:
    """Of the last whole row of a step."""
    steps = [row["step"] for row in jsonl.rows(metrics) if "train/loss" in row]
    return steps[-1] if steps else 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """Twice: a replay has nothing to save. launch/local.sh ends its ranks."""
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(TWICE_S)
        except subprocess.TimeoutExpired:
            continue


def _last_words(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("error: ", "rank "))]
    return (told or lines or ["no word why"])[-1]
