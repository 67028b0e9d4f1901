"""What a run is expected to take under its plan, and where the plan's profile stands: known before the first step.

Not here: what it took (`engine.first_steps`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conf.knobs import CONF
from conf.schema import Config
from engine.device import Device
from parallel.plan import ParallelPlan
from parallel.prediction import Prediction, predict_run
from parallel.profile import Profile, read_record
from parallel.promotion import promoted_observation, standing
from parallel.record import conditions, plain, predicted, software
from parallel.timeline import Timeline
from telemetry.prediction_table import Comparison, RankMeasurement, StepMeasurement

PROFILES = CONF / "parallel"


@dataclass(frozen=True)
class Expected:
    """predicted: as `parallel.profile.predicted` has it; timeline: the schedule of a step; reason: why no time is;
    observed: the profile's last promoted observation under these conditions.
    """

    profile: Profile
    standing: str
    predicted: Mapping[str, Any]
    reason: str | None
    about: Mapping[str, Any]
    timeline: Timeline | None = None
    observed: Mapping[str, Any] | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """For everything that names the run."""
        return plain(self.profile) | {"standing": self.standing}

    def line(self) -> str:
        name = f"{self.profile.name} version {self.profile.version} ({self.profile.hash[:12]})"
        return f"{name}: {self.standing}"

    def beside(self, ranks: list[RankMeasurement], steps: StepMeasurement) -> Comparison:
        return Comparison(self.predicted, ranks, steps, self.reason, {"profile": self.identity, **self.about})


def expect(config: Config, plan: ParallelPlan, device: Device) -> Expected:
    """For rank 0; reads the profile's record."""
    whole, reason = _whole(config, plan, device)
    observed = None
    try:
        record = read_record(config.parallel.name, PROFILES)
        stands = standing(record, config, software(), world_size=plan.world_size, device=device.name)
        observed = promoted_observation(record, config, software(), world_size=plan.world_size, device=device.name)
    except ValueError as error:
        stands = str(error)
    limit = config.cluster.memory_per_device or device.memory_per_rank()
    foreseen = predicted(config, plan, whole, device=device.kind)
    if plan.batch_ramp_up is not None:  # the ledger is of the whole batch
        foreseen |= {"communication": [{} for _ in foreseen["communication"]]}
    return Expected(
        profile=Profile.of(config.parallel),
        standing=stands,
        predicted=foreseen,
        reason=reason,
        about={
            "conditions": conditions(config, world_size=plan.world_size),
            "device": device.name,
            "software": software(),
            "memory_limit": limit,
        },
        timeline=None if whole is None else whole.timeline,
        observed=observed,
    )


def _whole(config: Config, plan: ParallelPlan, device: Device) -> tuple[Prediction | None, str | None]:
    """The prediction, or why bytes alone are predicted."""
    if plan.batch_ramp_up is not None:
        return None, f"train.batch_ramp_up={list(plan.batch_ramp_up)} begins with smaller batches than the plan's"
    try:
        return predict_run(config, plan, device=device.kind), None
    except ValueError as error:  # nobody measured this cluster
        return None, str(error)
