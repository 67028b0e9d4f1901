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
    """A value on a bound is normal; one that is not finite never is, so that no bound at all watches for NaN."""

    min: Optional[float] = None  # lowest normal value, or ratio to, or difference from, the reference; null: open
    max: Optional[float] = None  # highest; null: open
    relative_to: AlertReference = AlertReference.absolute  # absolute, or what the value is compared with:
    # prediction: the plan's; observation: the profile's last promoted one under these conditions; recent: the median of
    # the last `window` normal values of this run; peers (slice rank): the median of the ranks of the same stage
    compared_as: AlertCompared = AlertCompared.ratio  # value / reference, or value - reference
    window: int = 50  # recent: so many normal values make the reference; silent until half of them are there


@dataclass
class Persistence:
    """Raised when n of the last m observations are outside; cleared when fewer than n are and at least n inside."""

    n: int = 1
    m: int = 1


@dataclass
class AlertRule:
    metric: str = "???"  # run, plan: a key of metrics.jsonl; stage: without /stageN; rank: a key of ranks.jsonl;
    # axis: communication/calls, communication/bytes or communication/seconds, all operations of an axis together
    owner: str = "???"  # who looks into it
    mitigation: str = "???"  # the exact thing to try, with its knob or command
    slice: AlertSlice = AlertSlice.run  # run, stage, rank, axis: each apart; plan: as run, but anew under another plan
    normal: NormalRange = field(default_factory=NormalRange)  # where the metric should be
    persistence: Persistence = field(default_factory=Persistence)  # n of m observations
    severity: AlertSeverity = AlertSeverity.warning  # info, warning or error
    action: AlertAction = AlertAction.wandb  # log; wandb: log and send; stop; checkpoint_and_stop
