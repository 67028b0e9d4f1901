"""From a profile's record and a climb, or a finished run or benchmark, to the record with one more observation.

Not here: the rungs (`parallel.rungs`), running them (`engine.ladder`), reading what has finished (`engine.finished`),
when an observation promotes (`parallel.promotion`).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conf.knobs import CONF
from conf.schema import Config
from engine.finished import finished
from engine.ladder import Ladder, Result, as_kept, as_rows, read_run
from parallel.hardware import device_count, device_kind
from parallel.plan import ParallelPlan
from parallel.profile import Profile, new_record, prediction_or_none, read_record, record_path, write_record
from parallel.promotion import (
    Failure,
    here,
    loss_bounds,
    memory_failures,
    observations_of,
    parity_failures,
    replaced_step_s,
    status,
    time_failures,
)
from parallel.record import conditions, plain, software
from parallel.rungs import BASELINE, Rung, composed, rungs
from telemetry.run_folder import git_commit, new_run_id, utc_now

RANKS_PER_CORE = 4  # on a CPU; more would mostly wait for each other
ASIDE = ("promote.", "parallel=", "run.experiment=", "run.id=", "resume=")


@dataclass(frozen=True)
class Promotion:
    """config: as the whole plan runs; folder: of profiles; record: the profile's."""

    config: Config
    plan: ParallelPlan
    folder: Path
    record: dict[str, Any]
    rungs: list[Rung]
    ladder: Ladder

    @classmethod
    def open(cls, config: Config, plan: ParallelPlan, words: Sequence[str], *, config_dir: str | None) -> Promotion:
        """Raises ValueError where the profile cannot be climbed, with what would work."""
        name, kind = config.parallel.name, device_kind()
        folders = [CONF / "parallel", *([Path(config_dir) / "parallel"] if config_dir else [])]
        folder = next((one for one in reversed(folders) if (one / f"{name}.yaml").exists()), None)
        if folder is None:
            raise ValueError(f"profile={name} is no file of {folders[-1]}; its name and its file's must be the same")
        config = composed(config, plan.world_size)
        record = read_record(name, folder) or new_record(
            config, plan, prediction_or_none(config, plan, device=kind), device=kind, git_commit=git_commit()
        )
        if record["profile"]["hash"] != Profile.of(config.parallel).hash:
            raise ValueError(
                f"profile={name} is not what its record was written for; write it again with recipes/plan.py, "
                "and leave parallel.* to the profile"
            )
        climbed = rungs(config, ranks=plan.world_size, device=kind)
        kept = [f"parallel={name}", *(word for word in words if not word.startswith(ASIDE))]
        extra = ["--config-dir", str(Path(config_dir).resolve())] if config_dir else []
        now = here(config, world_size=plan.world_size, device=None, software=software())
        ladder = Ladder(config, [*extra, *kept], new_run_id(), replaced_step_s(record, now))
        return cls(config, plan, folder, record, climbed, ladder)

    def commands(self) -> str:
        """What a climb would run."""
        lines = [f"{len(self.rungs)} rungs:"]
        for rung in self.rungs:
            lines += [f"\n{rung.name}, {rung.ranks} ranks", f"    {shlex.join(self.ladder.command(rung))}"]
        return "\n".join(lines)

    def climbed(self) -> dict[str, Any]:
        """Climb, and keep the observation. Raises ValueError where this machine has too few devices."""
        _require_devices(max(rung.ranks for rung in self.rungs), self.config.parallel.name)
        kept: dict[str, Result] = {}
        if self.config.promote.reuse:
            kept = as_kept(self._last_ladder(), self.ladder, self.rungs)
        name = self.config.parallel.name
        print(f"profile {name}: {len(self.rungs)} rungs, {self.config.promote.steps} steps each", flush=True)
        results = self.ladder.climb(self.rungs, kept=kept, say=lambda line: print(line, flush=True))
        failures = [failure for result in results for failure in result.failures]
        timed = next(rung.name for rung in self.rungs if rung.timed)
        whole = next((one for one in results if one.rung == timed), None)
        prediction = (read_run(Path(results[0].folder)).prediction or {}) if results else {}
        return self._kept({
            "kind": "ladder", "baseline": BASELINE, "layers": self.config.promote.layers,
            "device": prediction.get("device"), "software": software(),
            "conditions": conditions(self.config, world_size=self.plan.world_size),
            "step_s": whole.step_s.get("measured") if whole else None,
            "predicted_step_s": whole.step_s.get("predicted") if whole else None,
            "rungs": as_rows(results, self.rungs),
        }, failures)  # fmt: skip

    def filled_in(self) -> dict[str, Any]:
        """The measurements of promote.run. It promotes where a ladder was climbed whole under the same conditions."""
        chosen, seen = self.config.promote, finished(self.config, self.plan)
        observation = {
            "kind": seen.kind, "baseline": seen.baseline_name, "step_s": seen.step_s,
            "predicted_step_s": seen.predicted_step_s, "rungs": [], **seen.observed,
        }  # fmt: skip
        limit = chosen.memory_limit or seen.memory_limit
        failures = memory_failures(seen.kind, peak_bytes=seen.peak_bytes, limit=limit)
        failures += time_failures(
            seen.kind, measured_s=seen.step_s, predicted_s=seen.predicted_step_s, tolerance=chosen.tolerance,
            replaced_s=replaced_step_s(self.record, observation),
        )  # fmt: skip
        if seen.baseline is not None:
            held = seen.observed["conditions"]
            relative, absolute = loss_bounds(held["precision"]["dtype"], num_layers=held["model"]["num_layers"])
            failures += parity_failures(seen.kind, seen.losses, seen.baseline, relative=relative, absolute=absolute)
        if not any(one["kind"] == "ladder" and one["promoted"] for one in observations_of(self.record, observation)):
            line = "no ladder was climbed to its end under these conditions; leave promote.run out to climb it"
            failures.append(Failure(seen.kind, "ladder", line))
        return self._kept(observation, failures)

    def verdict(self, observation: dict[str, Any]) -> str:
        name = f"{self.config.parallel.name} version {self.config.parallel.version}"
        path = record_path(self.config.parallel.name, self.folder)
        if observation["promoted"]:
            return f"promoted: {name} under the conditions of {path}"
        lines = [f"    {one['rung']}: {one['kind']}: {one['line']}" for one in observation["failures"]]
        return "\n".join([f"not promoted: {name}", *lines, f"kept in {path}"])

    def _kept(self, observation: dict[str, Any], failures: Sequence[Failure]) -> dict[str, Any]:
        """Into the record."""
        observation |= {
            "profile": plain(Profile.of(self.config.parallel)), "date": utc_now(), "git_commit": git_commit(),
            "promoted": not failures, "failures": [asdict(failure) for failure in failures],
        }  # fmt: skip
        self.record["observations"].append(observation)
        self.record["status"] = status(self.record)
        write_record(self.config.parallel.name, self.folder, self.record)
        return observation

    def _last_ladder(self) -> dict[str, Any] | None:
        now = here(self.config, world_size=self.plan.world_size, device=None, software=software())
        ladders = [one for one in observations_of(self.record, now) if one["kind"] == "ladder"]
        return ladders[-1] if ladders else None


def _require_devices(ranks: int, name: str) -> None:
    if device_kind() == "cuda":
        found = device_count()
        here = f"has {found} GPUs"
    else:
        cores = len(os.sched_getaffinity(0))
        found = RANKS_PER_CORE * cores
        here = f"carries at most {found} on its {cores} CPU cores"
    if ranks > found:
        raise ValueError(
            f"profile {name} needs {ranks} ranks but this machine {here}; climb it where there are enough, choose a "
            "smaller profile, or print the commands with promote.dry_run=true"
        )
