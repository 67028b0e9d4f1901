"""What a metric of a run should be: the plan's prediction of it, or what the profile's last promotion observed.

The names are those of metrics.jsonl and ranks.jsonl. A metric without a counterpart here cannot be the reference of an
alert rule; one whose number is not known in a run (a cluster without measured rates has no seconds) is None there.
Not here: predicting (`parallel.prediction`), what was measured, and whether it is as it should be (`telemetry.alerts`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from conf.schema import AlertReference, AlertSlice

Numbers = Mapping[str, Any]
COLLECTIVES = ("tensor", "data")  # of `Prediction.seconds`: what computation waits for; data: a tied table's too


@dataclass(frozen=True)
class Expectation:
    """predicted: `parallel.record.predicted`; observed: the last promoted observation under these conditions.

    plan: the profile's name; identity: what tells two plans apart, so that series of values begin anew.
    """

    plan: str
    identity: str
    predicted: Numbers
    observed: Numbers | None
    checkpoint_interval: int

    @classmethod
    def of(cls, plan: Mapping[str, Any], config: Mapping[str, Any]) -> Expectation:
        """From plan.json and config.json of a run's folder."""
        aside = ("predicted", "predicted_bytes", "observed", "warnings")
        shape = {key: value for key, value in plan.items() if key not in aside}
        return cls(
            plan=(plan.get("profile") or {}).get("name", "custom"),
            identity=json.dumps(shape, sort_keys=True, default=str),
            predicted=plan.get("predicted") or {},
            observed=plan.get("observed"),
            checkpoint_interval=config["checkpoint"]["interval"],
        )

    def number(self, reference: AlertReference, where: AlertSlice, metric: str, index: Any = None) -> float | None:
        """index: the stage of a stage or a rank, the name of an axis. None where it is not known."""
        source = self.predicted if reference is AlertReference.prediction else self.observed
        table = counterparts(reference, where)
        if metric == CHECKPOINT_AGE and metric in table:
            return float(self.checkpoint_interval) or None
        if not source or metric not in table:
            return None
        return table[metric](source, index)


def counterparts(reference: AlertReference, where: AlertSlice) -> Mapping[str, Callable[[Numbers, Any], float | None]]:
    """Metrics that have a number of this kind in this slice."""
    where = AlertSlice.run if where is AlertSlice.plan else where
    return {AlertReference.prediction: PREDICTED, AlertReference.observation: OBSERVED}[reference].get(where, {})


CHECKPOINT_AGE = "train/checkpoint_age_steps"


def _named(name: str) -> Callable[[Numbers, Any], float | None]:
    return lambda predicted, _: predicted.get(name)


def _bubble(predicted: Numbers, stage: Any) -> float | None:
    bubble = predicted.get("bubble")
    if bubble is None:
        return None
    if stage is None:
        return sum(bubble) / len(bubble)
    return bubble[stage] if stage < len(bubble) else None


def _memory(predicted: Numbers, stage: Any) -> float | None:
    """Of a CPU no number: there a process holds its libraries and the allocator's slack too."""
    if predicted.get("device") != "cuda":
        return None
    totals = [ledger["total"] for ledger in predicted["memory"]]
    if stage is None:
        return max(totals)
    return totals[stage] if stage < len(totals) else None


def _communication(what: str) -> Callable[[Numbers, Any], float | None]:
    """Of the stage that has most."""

    def most(predicted: Numbers, axis: Any) -> float | None:
        found = [axes[axis][what] for axes in predicted.get("communication", ()) if axis in axes]
        return max((value for value in found if value is not None), default=None)

    return most


def _exposed(predicted: Numbers, _: Any) -> float | None:
    """Collectives and transfers that computation waits for, over the step; a mean of the stages."""
    seconds = predicted.get("seconds")
    if seconds is None:
        return None
    return sum(seconds[name] for name in (*COLLECTIVES, "pipe")) / predicted["step_s"]


def _overlap(predicted: Numbers, _: Any) -> float | None:
    """Share of all collectives' time that runs beside computation, without transfers; a mean of the stages."""
    seconds, stages = predicted.get("seconds"), predicted.get("communication", ())
    if seconds is None:
        return None
    whole = sum(axis["seconds"] for axes in stages for axis in axes.values()) / len(stages) - seconds["pipe"]
    return max(0.0, 1 - sum(seconds[name] for name in COLLECTIVES) / whole) if whole > 0 else None


def _recomputed(predicted: Numbers, _: Any) -> float | None:
    seconds = predicted.get("seconds")
    return seconds and seconds["recomputation"] / (seconds["compute"] + seconds["recomputation"])


AXIS = {f"communication/{what}": _communication(what) for what in ("calls", "bytes", "seconds")}
PREDICTED: dict[AlertSlice, dict[str, Callable[[Numbers, Any], float | None]]] = {
    AlertSlice.run: {
        "train/mfu": _named("mfu"),
        "train/hfu": _named("hfu"),
        "train/step_time_s": _named("step_s"),
        "train/tokens_per_s": _named("tokens_per_s"),
        "train/tokens_per_s_per_device": _named("tokens_per_s_per_device"),
        CHECKPOINT_AGE: lambda predicted, _: None,  # not the plan's: checkpoint.interval
        "pipeline/bubble": _bubble,
        "pipeline/imbalance": _named("imbalance"),
        "pipeline/recompute_share": _recomputed,
        "communication/exposed_share": _exposed,
        "communication/overlap_share": _overlap,
        "memory/peak_bytes": _memory,
    },
    AlertSlice.stage: {
        "pipeline/bubble": _bubble,
        "memory/peak_bytes": _memory,
        "memory/growth_bytes": _memory,
    },
    AlertSlice.rank: {"peak_bytes": _memory, "growth_bytes": _memory},
    AlertSlice.axis: AXIS,
}


def _observed_tokens(observed: Numbers, _: Any) -> float | None:
    batch, step_s = observed["conditions"]["batch"], observed["step_s"]
    return step_s and batch["global_batch_size"] * batch["sequence_length"] / step_s


def _observed_tokens_per_device(observed: Numbers, _: Any) -> float | None:
    tokens = _observed_tokens(observed, None)
    return tokens and tokens / observed["conditions"]["cluster"]["ranks"]


def _measured_mfu(observed: Numbers, _: Any) -> float | None:
    """Of a run that was filled in; a ladder keeps step times alone."""
    return observed["measured"]["mfu"]["measured"] if "measured" in observed else None


def _measured(*path: str) -> Callable[[Numbers, Any], float | None]:
    """Of one stage of a run that was filled in."""

    def of_stage(observed: Numbers, stage: Any) -> float | None:
        stages = observed["measured"]["stages"] if "measured" in observed else []
        if stage >= len(stages):
            return None
        found = stages[stage]
        for name in path:
            found = found[name]
        return found["measured"]

    return of_stage


OBSERVED: dict[AlertSlice, dict[str, Callable[[Numbers, Any], float | None]]] = {
    AlertSlice.run: {
        "train/step_time_s": _named("step_s"),
        "train/tokens_per_s": _observed_tokens,
        "train/tokens_per_s_per_device": _observed_tokens_per_device,
        "train/mfu": _measured_mfu,
    },
    AlertSlice.stage: {
        "pipeline/bubble": _measured("bubble"),
        "memory/growth_bytes": _measured("memory", "growth"),
    },
}
