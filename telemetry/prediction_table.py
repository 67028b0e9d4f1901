"""What a plan was predicted to take beside what the first steps took: prediction.json's content, and as text.

Values in, values and text out. Of the ranks of a pipeline stage the one that holds most counts for memory, their mean
for times. A bubble is the share of a step that a stage waits for other stages, transfers included. Not here: measuring
(`engine.first_steps`) and predicting (`parallel.record.predicted` is what is taken).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from telemetry.tables import size, table

STATES = ("weights", "gradients", "master_weights", "optimizer_moments")
Pair = dict[str, Any]  # predicted, measured; None: not known


@dataclass(frozen=True)
class RankMeasurement:
    """One rank in the first steps. Bytes; None where it was not measured."""

    pp_rank: int
    states: Mapping[str, int]  # by the ledger's names, as tensors
    activations: int  # what autograd kept for backward at its most, logits included
    peak_bytes: int  # of the device: allocated tensors on CUDA, the whole process on CPU
    growth_bytes: int  # of it since before the model was built
    bubble: float | None  # share of a step; None without a pipeline engine
    collectives: Mapping[str, Mapping[str, float]] | None = None  # axis -> calls, bytes, seconds of one step


@dataclass(frozen=True)
class StepMeasurement:
    """Medians over the timed steps, the same on every rank."""

    first_step: int
    last_step: int
    step_s: float
    tokens_per_s: float
    mfu: float | None


@dataclass(frozen=True)
class Comparison:
    """Of one run. `about`: what else prediction.json says (profile, standing, device, limit)."""

    predicted: Mapping[str, Any]
    ranks: Sequence[RankMeasurement]
    steps: StepMeasurement
    reason: str | None  # why no time is predicted
    about: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        whole = {
            name: _pair(self.predicted[name], getattr(self.steps, name)) for name in ("step_s", "tokens_per_s", "mfu")
        }
        return {
            **self.about,
            "timed_steps": [self.steps.first_step, self.steps.last_step],
            "no_time_predicted": self.reason,
            **whole,
            "peak_bytes": [rank.peak_bytes for rank in self.ranks],
            "growth_bytes": [rank.growth_bytes for rank in self.ranks],
            "stages": [self._stage(pp_rank) for pp_rank in range(len(self.predicted["memory"]))],
        }

    def _stage(self, pp_rank: int) -> dict[str, Any]:
        ranks = [rank for rank in self.ranks if rank.pp_rank == pp_rank]
        ledger, bubble = self.predicted["memory"][pp_rank], self.predicted["bubble"]
        memory = {name: _pair(ledger[name], max(rank.states[name] for rank in ranks)) for name in STATES}
        memory["states"] = _pair(ledger["states"], max(sum(rank.states.values()) for rank in ranks))
        memory["activations"] = _pair(ledger["activations"], max(rank.activations for rank in ranks))
        memory["growth"] = _pair(ledger["total"], max(rank.growth_bytes for rank in ranks))
        waits = [rank.bubble for rank in ranks if rank.bubble is not None]
        found = {
            "memory": memory,
            "bubble": _pair(None if bubble is None else bubble[pp_rank], _mean(waits)),
            "communication": {},
        }
        if all(rank.collectives is not None for rank in ranks):
            axes = self.predicted["communication"][pp_rank]
            found["communication"] = {axis: _axis(axis, axes.get(axis), ranks) for axis in _axes(axes, ranks)}
        return found

    def as_summary(self) -> dict[str, Any]:
        """Flat numbers for sinks that keep one set a run; of memory the stage that is predicted worst."""
        found = self.as_json()
        stages = found["stages"]
        worst = max(stages, key=lambda stage: stage["memory"]["growth"]["predicted"])
        pairs = {name: found[name] for name in ("step_s", "tokens_per_s", "mfu")}
        pairs |= {f"{name}_bytes": worst["memory"][name] for name in ("states", "activations", "growth")}
        pairs["bubble"] = {
            side: _mean([stage["bubble"][side] for stage in stages if stage["bubble"][side] is not None])
            for side in ("predicted", "measured")
        }
        profile = found.get("profile", {})
        return {f"{side}/{name}": pair[side] for name, pair in pairs.items() for side in pair} | {
            f"profile/{name}": value for name, value in profile.items()
        }

    def text(self) -> str:
        """A line a stage, and the step time below."""
        found = self.as_json()
        steps = f"{self.steps.first_step} to {self.steps.last_step}"
        title = f"predicted and measured (memory: tensors of the first step; times: median of steps {steps})"
        header = ("stage", "states", "measured", "ratio", "activations", "measured", "ratio", "bubble", "measured")
        rows = [
            (stage, *_bytes(one["memory"]["states"]), *_bytes(one["memory"]["activations"]), *_shares(one["bubble"]))
            for stage, one in enumerate(found["stages"])
        ]
        lines = [title, table(header, rows), *self._communication(found), self._time(found["step_s"])]
        mfu = found["mfu"]
        if mfu["measured"] is not None and mfu["predicted"] is not None:
            lines.append(f"MFU        {mfu['predicted']:.1%} predicted, {mfu['measured']:.1%} measured")
        return "\n".join(lines)

    def _time(self, step: Pair) -> str:
        if step["predicted"] is None:
            return f"step time  {step['measured']:.4g} s measured; not predicted: {self.reason}"
        return (
            f"step time  {step['predicted']:.4g} s predicted, {step['measured']:.4g} s measured, "
            f"ratio {step['measured'] / step['predicted']:.2f}"
        )

    def _communication(self, found: Mapping[str, Any]) -> list[str]:
        rows = [
            (stage, axis, *_bytes(one["bytes"]), *_seconds(one["seconds"]))
            for stage, row in enumerate(found["stages"])
            for axis, one in row["communication"].items()
        ]
        header = ("stage", "axis", "bytes sent", "measured", "ratio", "seconds", "measured")
        return [table(header, rows)] if rows else []


def _pair(predicted: Any, measured: Any) -> Pair:
    return {"predicted": predicted, "measured": measured}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _axes(predicted: Mapping[str, Any], ranks: Sequence[RankMeasurement]) -> list[str]:
    return list(dict.fromkeys([*predicted, *(axis for rank in ranks for axis in rank.collectives or {})]))


def _axis(axis: str, predicted: Mapping[str, Any] | None, ranks: Sequence[RankMeasurement]) -> dict[str, Pair]:
    measured = [(rank.collectives or {}).get(axis, {"calls": 0, "bytes": 0, "seconds": 0.0}) for rank in ranks]
    return {
        name: _pair(predicted[name] if predicted else None, _mean([one[name] for one in measured]))
        for name in ("calls", "bytes", "seconds")
    }


def _bytes(pair: Pair) -> tuple[str, str, str]:
    if pair["predicted"] is None:
        return "-", size(pair["measured"]), "-"
    ratio = f"{pair['measured'] / pair['predicted']:.2f}" if pair["predicted"] else "-"
    return size(pair["predicted"]), size(pair["measured"]), ratio


def _shares(pair: Pair) -> tuple[str, str]:
    return _shown(pair["predicted"], ".0%"), _shown(pair["measured"], ".0%")


def _seconds(pair: Pair) -> tuple[str, str]:
    return _shown(pair["predicted"], ".3g"), _shown(pair["measured"], ".3g")


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
