"""Climbs the ladder of a profile: each rung is a run of recipes/pretrain.py in ranks of its own, judged as it ends.

The corpus, the initial weights and the batches are the same under every plan, so every rung must draw the losses of
the one-device rung. A rung that fails ends the climb. Not here: which rungs there are (`parallel.rungs`) and what
promotes (`parallel.promotion`).
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from conf.schema import Config
from engine.checkpoint_folder import checkpoint_path
from parallel.promotion import Failure, loss_bounds, memory_failures, parity_failures, time_failures
from parallel.rungs import Rung
from telemetry import jsonl

ROOT = Path(__file__).resolve().parents[1]
LOCAL = ROOT / "launch" / "local.sh"
TIMED_OUT = -1  # in place of an exit code
OUT_OF_MEMORY = ("out of memory", "outofmemory", "not enough memory", "can't allocate memory")


@dataclass(frozen=True)
class Observed:
    """What a finished run's folder says. `prediction`: prediction.json, or None."""

    folder: str
    losses: Mapping[int, float]  # by step
    utilisation: float | None  # model FLOP/s over the matrix rate measured there, median
    prediction: Mapping[str, Any] | None
    error: str | None  # of failed.json

    def pair(self, name: str) -> dict[str, Any]:
        return (self.prediction or {}).get(name) or {"predicted": None, "measured": None}

    @property
    def communication_s(self) -> dict[str, float]:
        """Seconds a step by axis, of the stage that communicates most."""
        found: dict[str, float] = {}
        for stage in (self.prediction or {}).get("stages", []):
            for axis, one in stage["communication"].items():
                found[axis] = max(found.get(axis, 0.0), one["seconds"]["measured"])
        return found


@dataclass(frozen=True)
class Result:
    """Of one rung, as the profile's record keeps it; folder: from the folder of the call."""

    rung: str
    ranks: int
    command: str
    folder: str
    wall_s: float
    losses: Mapping[int, float]
    step_s: Mapping[str, Any] = field(default_factory=dict)  # predicted, measured
    peak_bytes: Sequence[int] = ()  # of each rank
    memory_limit: float | None = None
    communication_s: Mapping[str, float] = field(default_factory=dict)
    mfu: Mapping[str, Any] = field(default_factory=dict)
    mfu_of_measured_rate: float | None = None
    failures: Sequence[Failure] = ()
    reused: bool = False

    def line(self) -> str:
        """For the console."""
        words = [f"{self.rung:<42} {self.ranks} rank{'s' if self.ranks > 1 else ' '}"]
        if self.step_s.get("measured") is not None:
            words.append(f"{self.step_s['measured']:.3f} s a step")
            busy = sum(self.communication_s.values())
            words.append(f"communication {busy:.3f} s")
        if self.peak_bytes:
            words.append(f"peak {max(self.peak_bytes) / 1e9:.2f} GB")
        if self.mfu_of_measured_rate is not None:
            words.append(f"MFU {self.mfu_of_measured_rate:.1%}")
        words.append("reused" if self.reused else f"took {self.wall_s:.0f} s")
        return "  ".join([*words, "FAILED" if self.failures else "passed"])


def read_run(folder: Path) -> Observed:
    """Losses of a step that was trained twice: the later."""
    prediction, failed = folder / "prediction.json", folder / "failed.json"
    rows = [row for row in jsonl.rows(folder / "metrics.jsonl") if "train/loss" in row]
    rates = sorted(row["train/mfu_of_measured_rate"] for row in rows)
    return Observed(
        folder=str(folder),
        losses={row["step"]: row["train/loss"] for row in rows},
        utilisation=rates[len(rates) // 2] if rates else None,
        prediction=json.loads(prediction.read_text()) if prediction.exists() else None,
        error=json.loads(failed.read_text())["error"] if failed.exists() else None,
    )


@dataclass(frozen=True)
class Ladder:
    """words: the command line that the rungs start from, the profile chosen in it; climb_id: names their folders."""

    config: Config
    words: Sequence[str]
    climb_id: str
    replaced_s: float | None  # step time of the profile that this one replaces

    @property
    def saved_step(self) -> int:
        return self.config.promote.steps // 2

    def folder(self, rung: str) -> Path:
        slug = rung.replace(",", "").replace(" ", "_")
        parent = Path(self.config.run.dir).expanduser().absolute() / f"promote_{self.config.parallel.name}"
        return parent / f"{self.climb_id}-{slug}"

    def command(self, rung: Rung, *, resumed: Path | None = None) -> list[str]:
        """resumed: the folder of the rung that it goes on from, where that is not of this climb."""
        steps, folder, resume = self.config.promote.steps, self.folder(rung.name), "never"
        if rung.resumes is not None:
            start = resumed or self.folder(rung.resumes)
            resume = str(checkpoint_path(start / "checkpoints", self.saved_step))
        return [
            str(LOCAL), "-n", str(rung.ranks), str(ROOT / "recipes" / "pretrain.py"), *self.words, *rung.overrides,
            f"train.train_iters={steps}", "train.eval_interval=0", "train.sample_tokens=0",
            f"checkpoint.interval={self.saved_step}", "checkpoint.keep_last=-1", "checkpoint.asynchronous=false",
            "telemetry.plot=false", "telemetry.wandb.mode=disabled", "telemetry.time_collectives=true",
            f"run.experiment={folder.parent.name}", f"run.id={folder.name}", f"resume={resume}",
        ]  # fmt: skip

    def climb(self, rungs: Sequence[Rung], *, kept: Mapping[str, Result], say: Callable[[str], None]) -> list[Result]:
        """Results up to the first rung that fails. kept: those of an earlier climb that need not run again."""
        results: list[Result] = []
        for rung in rungs:
            baseline = next((one.losses for one in results if one.rung == rung.baseline), None)
            before = next((Path(one.folder).absolute() for one in results if one.rung == rung.resumes), None)
            result = kept.get(rung.name) or self._run(rung, baseline, before)
            results.append(result)
            say(result.line())
            if result.failures:
                break
        return results

    def _run(self, rung: Rung, baseline: Mapping[int, float] | None, resumed: Path | None) -> Result:
        command, folder = self.command(rung, resumed=resumed), self.folder(rung.name)
        folder.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        code = launched(command, folder.with_suffix(".txt"), timeout_s=self.config.promote.timeout_s)
        seen = read_run(folder)
        prediction = seen.prediction or {}
        result = Result(
            rung=rung.name, ranks=rung.ranks, command=_portable(shlex.join(command)), folder=_portable(str(folder)),
            wall_s=time.monotonic() - start, losses=seen.losses, step_s=seen.pair("step_s"),
            peak_bytes=prediction.get("peak_bytes", ()), memory_limit=prediction.get("memory_limit"),
            communication_s=seen.communication_s, mfu=seen.pair("mfu"), mfu_of_measured_rate=seen.utilisation,
        )  # fmt: skip
        return replace(result, failures=self.judged(rung, seen, code, baseline or seen.losses))

    def judged(self, rung: Rung, seen: Observed, code: int, baseline: Mapping[int, float]) -> list[Failure]:
        """What is wrong with a rung that ended; `baseline`: the losses that it must draw."""
        if code != 0 or seen.prediction is None:
            return [self._broken(rung, seen, code)]
        relative, absolute = loss_bounds(self.config.precision.dtype.value, num_layers=self.config.model.num_layers)
        failures = parity_failures(rung.name, seen.losses, baseline, relative=relative, absolute=absolute)
        expected = range(1 if rung.resumes is None else self.saved_step + 1, self.config.promote.steps + 1)
        if not failures and sorted(seen.losses) != list(expected):
            line = f"it trained steps {sorted(seen.losses)}, not {expected.start} to {expected.stop - 1}"
            failures = [Failure(rung.name, "parity", line)]
        if rung.resumes is not None:
            return [replace(failure, kind="restart") for failure in failures]
        limit = self.config.promote.memory_limit or seen.prediction["memory_limit"]
        failures += memory_failures(rung.name, peak_bytes=seen.prediction["peak_bytes"], limit=limit)
        if rung.timed:
            step = seen.pair("step_s")
            failures += time_failures(
                rung.name, measured_s=step["measured"], predicted_s=step["predicted"],
                tolerance=self.config.promote.tolerance, replaced_s=self.replaced_s,
            )  # fmt: skip
        return failures

    def _broken(self, rung: Rung, seen: Observed, code: int) -> Failure:
        """A rung that came to no end."""
        output = self.folder(rung.name).with_suffix(".txt")
        error = " ".join((seen.error or "").split())[:300]
        if code == TIMED_OUT:
            kind, what = "hang", f"it had not ended after promote.timeout_s={self.config.promote.timeout_s:g}"
        elif "no progress for" in error:
            kind, what = "hang", error
        elif any(words in error.lower() for words in OUT_OF_MEMORY):
            kind, what = "memory", error
        elif "NonFiniteError" in error or any(not math.isfinite(loss) for loss in seen.losses.values()):
            kind, what = "parity", error
        else:
            kind, what = "crash" if rung.resumes is None else "restart", error or f"exit code {code}: {_said(output)}"
        return Failure(rung.name, kind, _portable(f"{what} (its output: {output})"))


def _portable(text: str) -> str:
    """Paths from the folder of the call, or of the code: a record is read on other machines too."""
    for start in (Path.cwd(), ROOT):
        text = text.replace(f"{start}/", "")
    return text


def _said(output: Path) -> str:
    """The last line of a run that names an error, of one that left no failed.json."""
    lines = output.read_text(errors="replace").splitlines() if output.exists() else []
    named = [line.strip() for line in lines if re.match(r"(error:|\w*(Error|Exception)\b)", line.strip())]
    return named[-1][:300] if named else "it named no error"


def launched(command: Sequence[str], output: Path, *, timeout_s: float) -> int:
    """Exit code of the command, its output in a file; TIMED_OUT where it had to be ended."""
    aside = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "LAUNCH_MARKER")
    environ = {key: value for key, value in os.environ.items() if key not in aside}
    with output.open("w") as file:
        process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            return process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return TIMED_OUT
        finally:
            _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    """launch/local.sh ends its ranks when it is asked for the second time."""
    for _ in range(2):
        if process.poll() is None:
            process.terminate()
            time.sleep(1.5)
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()


def as_kept(observation: Mapping[str, Any] | None, ladder: Ladder, rungs: Sequence[Rung]) -> dict[str, Result]:
    """Rungs that passed in an earlier climb, ran what they would run now, and whose folders are still there."""
    kept: dict[str, Result] = {}
    for row, rung in zip(observation["rungs"] if observation else [], rungs, strict=False):
        same = row["rung"] == rung.name and row["ranks"] == rung.ranks and row["overrides"] == list(rung.overrides)
        if not same or row["failures"] or not Path(row["folder"]).is_dir():
            break
        known = {name: value for name, value in row.items() if name not in ("overrides", "failures")}
        losses = {int(step): loss for step, loss in row["losses"].items()}
        kept[rung.name] = Result(**known | {"losses": losses, "reused": True})
    return kept


def as_rows(results: Sequence[Result], rungs: Sequence[Rung]) -> list[dict[str, Any]]:
    """For the record."""
    return [asdict(one) | {"overrides": list(rung.overrides)} for one, rung in zip(results, rungs, strict=False)]
