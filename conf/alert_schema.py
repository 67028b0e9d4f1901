"""One alert rule: what is watched, where it is normal, who is told and what to try. Part of `conf.schema`.

`Config.alerts` is a dict of them by name, so that a command line can change one field of one rule, add a rule, or take
one away (`~alerts.straggler`). How a rule is evaluated: `telemetry.alerts`; what may stand in it: `conf.alert_rules`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from conf.choices import AlertAction, AlertCompared, AlertReference, AlertSeverity, AlertSlice


@dataclass
class NormalRange:
    """A value on a bound is normal; one that is not finite never is, so that no bound at all watches for NaN.

    relative_to: absolute, the bounds are the metric's own; prediction, they are relative to the plan's; observation, to
    the profile's last promoted one under these conditions; recent, to the median of the last `window` normal values of
    this run; peers (slice rank), to the median of the other ranks of the same stage.
    """

    min: Optional[float] = None  # lowest normal value, or ratio to, or difference from, the reference; null: open
    max: Optional[float] = None  # highest; null: open
    relative_to: AlertReference = AlertReference.absolute  # absolute, prediction, observation, recent or peers
    compared_as: AlertCompared = AlertCompared.ratio  # value / reference, or value - reference
    window: int = 50  # recent: so many normal values make the reference; silent until half of them are there


@dataclass
class Persistence:
    """Raised when n of the last m observations are outside; cleared when fewer than n are and at least n inside."""

    n: int = 1  # observations outside that raise
    m: int = 1  # observations looked back on, one a step, or one every telemetry.ranks_interval steps


@dataclass
class AlertRule:
    """metric: a key of metrics.jsonl; of a stage without its /stageN; of a rank a key of ranks.jsonl; of an axis
    communication/calls, /bytes or /seconds, all its operations together.
    """

    metric: str = "???"  # what is watched: a key of metrics.jsonl, without /stageN; slice rank: of ranks.jsonl
    owner: str = "???"  # who looks into it
    mitigation: str = "???"  # the exact thing to try, with its knob or command
    slice: AlertSlice = AlertSlice.run  # run, stage, rank, axis: each apart; plan: as run, but anew under another plan
    normal: NormalRange = field(default_factory=NormalRange)  # where the metric should be
    persistence: Persistence = field(default_factory=Persistence)  # n of m observations
    severity: AlertSeverity = AlertSeverity.warning  # info, warning or error
    action: AlertAction = AlertAction.wandb  # log; wandb: log and send; stop; checkpoint_and_stop
