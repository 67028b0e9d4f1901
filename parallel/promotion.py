"""When a profile counts as promoted: the verdict on an observation, and what it says under other conditions.

An observation is what one climb of the ladder (`parallel.rungs`), one finished run or one benchmark showed, as a dict
of a profile's record (`parallel.profile`): conditions, device, software, rungs, failures. A promotion holds for the
model, cluster, software versions and batch shape it was observed under, and for nothing else. Pure Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conf.schema import Config
from parallel.profile import PREDICTED_ONLY, Profile, determined
from parallel.record import conditions

PROMOTED = "promoted"
UNNAMED = ("name",)  # of a model: a label


@dataclass(frozen=True)
class Failure:
    """kind: parity, memory, time, hang, crash, restart, ladder (a rung that nobody climbed); line: for the reader."""

    rung: str
    kind: str
    line: str


def time_failures(
    rung: str, *, measured_s: float, predicted_s: float | None, tolerance: float, replaced_s: float | None
) -> list[Failure]:
    """Step time within its tolerance of the prediction, or less than that of the profile it replaces."""
    if replaced_s is not None and measured_s < replaced_s:
        return []
    slower = "" if replaced_s is None else f", and not below the {replaced_s:.4g} s of the profile it replaces"
    if predicted_s is None:
        return [
            Failure(
                rung,
                "time",
                f"a step took {measured_s:.4g} s, but none was predicted: the cluster has no measured links and rates; "
                f"measure them with recipes/probe.py and choose that cluster{slower}",
            )
        ]
    if abs(measured_s / predicted_s - 1) <= tolerance:
        return []
    line = (
        f"a step took {measured_s:.4g} s, {measured_s / predicted_s:.2f} x the {predicted_s:.4g} s predicted; "
        f"promote.tolerance={tolerance:g} allows {1 - tolerance:.2f} to {1 + tolerance:.2f}{slower}"
    )
    return [Failure(rung, "time", line)]


def memory_failures(rung: str, *, peak_bytes: Sequence[float], limit: float | None) -> list[Failure]:
    """No rank above the limit of a device."""
    if limit is None:
        line = "no limit is known; set promote.memory_limit or cluster.memory_per_device, in bytes"
        return [Failure(rung, "memory", line)]
    over = [(rank, peak) for rank, peak in enumerate(peak_bytes) if peak > limit]
    if not over:
        return []
    rank, peak = max(over, key=lambda one: one[1])
    line = f"rank {rank} held {peak / 1e9:.3f} GB at its peak, over the {limit / 1e9:.3f} GB of a device"
    return [Failure(rung, "memory", line)]


def parity_failures(
    rung: str, losses: Mapping[int, float], baseline: Mapping[int, float], *, relative: float, absolute: float
) -> list[Failure]:
    """The losses of every step that both have, against the baseline's; one of the bounds is 0."""
    steps = sorted(losses.keys() & baseline.keys())
    if not steps:
        return [Failure(rung, "parity", "it shares no step with the baseline")]
    off = {step: abs(losses[step] - baseline[step]) for step in steps}
    allowed = {step: max(absolute, relative * abs(baseline[step])) for step in steps}
    wrong = [step for step in steps if not off[step] <= allowed[step]]  # so written that a nan is wrong
    if not wrong:
        return []
    unordered = [step for step in wrong if not math.isfinite(off[step])]
    worst = unordered[0] if unordered else max(wrong, key=lambda step: off[step] - allowed[step])
    line = (
        f"the loss of step {worst} is {losses[worst]:.8g} and the baseline's {baseline[worst]:.8g}: "
        f"{off[worst]:.2g} apart, {allowed[worst]:.2g} is allowed ({len(wrong)} of {len(steps)} steps are off)"
    )
    return [Failure(rung, "parity", line)]


def loss_bounds(dtype: str, *, num_layers: int) -> tuple[float, float]:
    """(relative, absolute) distance that two plans' losses may have.

    fp32: 1e-5 relative, as sums in another order. 16 bit: u = 2^-9 (bf16) or 2^-12 (fp16) a rounding, 4 L + 4 rounded
    results in a row, logits below 2, a loss moves by at most twice a logit's error (tests/engine/test_parity.py).
    """
    if dtype == "fp32":
        return 1e-5, 0.0
    unit = 2.0**-9 if dtype == "bf16" else 2.0**-12
    return 0.0, 2 * 2.0 * unit * (4 * num_layers + 4) ** 0.5


def replaced_step_s(record: Mapping[str, Any], here: Mapping[str, Any]) -> float | None:
    """Step time of the version that this one replaces, where it was promoted under the same conditions."""
    before = observations_of(record.get("replaces") or {"observations": []}, here)
    times = [one["step_s"] for one in before if one["promoted"]]
    return times[-1] if times else None


def observations_of(record: Mapping[str, Any], here: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those made under the same conditions, oldest first; `here`: another observation, or `here()`."""
    return [one for one in record["observations"] if not _differences(one, here)]


def here(config: Config, *, world_size: int, device: str | None, software: Mapping[str, str] | None) -> dict[str, Any]:
    """The conditions that an observation made now would be under; device and software None: not compared."""
    found = {"conditions": conditions(config, world_size=world_size)}
    return found | {"device": device, "software": None if software is None else dict(software)}


def standing(
    record: Mapping[str, Any] | None,
    config: Config,
    versions: Mapping[str, str] | None,
    *,
    world_size: int,
    device: str | None = None,
) -> str:
    """ "promoted", "predicted only" (and why not promoted), or "not observed here: ..." and what differs.

    versions: `parallel.record.software()`, None where the plan is made for another machine; device: its product name.
    """
    if record is None:
        return f"{PREDICTED_ONLY}: profile {config.parallel.name} has no record"
    if record["profile"]["hash"] != Profile.of(config.parallel).hash:
        changed = _changed(record["profile"]["determined"], determined(config.parallel))
        return f"not observed here: {config.parallel.name} with other knobs ({', '.join(changed)})"
    now = here(config, world_size=world_size, device=device, software=versions)
    same = observations_of(record, now)
    if same:
        kinds = dict.fromkeys(failure["kind"] for failure in same[-1]["failures"])
        return PROMOTED if same[-1]["promoted"] else f"{PREDICTED_ONLY}: not promoted ({', '.join(kinds)})"
    elsewhere = [_differences(one, now) for one in record["observations"] if one["promoted"]]
    if not elsewhere:
        return PREDICTED_ONLY
    nearest = min(elsewhere, key=lambda groups: sum(map(len, groups.values())))
    return "not observed here: " + "; ".join(f"{group} differs ({', '.join(d)})" for group, d in nearest.items())


def promoted_observation(
    record: Mapping[str, Any] | None,
    config: Config,
    versions: Mapping[str, str],
    *,
    world_size: int,
    device: str,
) -> dict[str, Any] | None:
    """The last one that promoted this profile under the conditions of this run; None where there is none."""
    if record is None or record["profile"]["hash"] != Profile.of(config.parallel).hash:
        return None
    same = observations_of(record, here(config, world_size=world_size, device=device, software=versions))
    return next((one for one in reversed(same) if one["promoted"]), None)


def status(record: Mapping[str, Any]) -> str:
    """What the record says of itself: for whom it is promoted."""
    for_whom = dict.fromkeys(
        f"{one['conditions']['model']['name']} on {one['conditions']['cluster']['ranks']} ranks of "
        f"{one['conditions']['cluster']['name']} ({one['device']})"
        for one in record["observations"]
        if one["promoted"]
    )
    return f"{PROMOTED} for {'; '.join(for_whom)}" if for_whom else PREDICTED_ONLY


def _differences(observation: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[str]]:
    """Group (model, cluster, batch, precision, zero, device, software) -> what differs in it."""
    found: dict[str, list[str]] = {}
    for group, values in now["conditions"].items():
        changed = _changed(observation["conditions"].get(group, {}), values)
        found[group] = [line for line in changed if not (group == "model" and line.startswith(UNNAMED))]
    if now["device"] is not None and observation["device"] != now["device"]:
        found["device"] = [f"{now['device']} here, {observation['device']} there"]
    if now["software"] is not None:
        found["software"] = list(_changed(observation["software"], now["software"]))
    return {group: lines for group, lines in found.items() if lines}


def _changed(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    return list(_changes(there, here))


def _changes(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    for key in {**there, **here}:
        if there.get(key) != here.get(key):
            yield f"{key} {_shown(here.get(key))} here, {_shown(there.get(key))} there"


def _shown(value: Any) -> str:
    return "default" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
