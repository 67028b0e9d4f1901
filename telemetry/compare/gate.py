"""A run judged against a baseline, for the CI of people who change plans: parity, memory, utilisation, communication.

The classes are judged in this order and one is reported at a time: memory or speed of a run that computes other
numbers say nothing. What the baseline measured and the run did not fails; what the baseline did not measure is not
judged, and said so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from parallel.promotion import Failure, parity_failures
from telemetry.compare.divergence import LOSS, NAMES, NORM, Tolerance, is_close
from telemetry.compare.outcome import peak_bytes, typical
from telemetry.compare.runs import Run, same_batches

CLASSES = ("parity", "memory", "utilisation", "communication")
# The first that the baseline has. Not the MFU of the matrix rate measured at its start: that is another each time.
UTILISATIONS = {
    "train/mfu": "MFU",
    "train/model_flops_per_s_per_device": "model FLOP/s a device",
    "train/tokens_per_s_per_device": "tokens/s a device",
}


@dataclass(frozen=True)
class Limits:
    """parity: of losses and norms over the first `steps` shared steps, over which rounding in another order stays
    within it; the others: shares that memory and communication may be above and utilisation below the baseline's."""

    parity: Tolerance
    steps: int = 20
    memory: float = 0.05
    utilisation: float = 0.10
    communication: float = 0.20


@dataclass(frozen=True)
class Verdict:
    """failures: of the first class that has any; passed: the classes before it; unjudged: (class, why)."""

    failures: Sequence[Failure]
    passed: Sequence[str]
    unjudged: Sequence[tuple[str, str]]

    def text(self, run: Run, baseline: Run) -> str:
        lines = [f"{kind}: {line}" for kind, line in self.unjudged]
        lines = [f"gate {name}: within its tolerance" for name in self.passed] + [f"gate {line}" for line in lines]
        if not self.failures:
            return "\n".join([*lines, f"gate passed: {run.name} against {baseline.name}"])
        kind = self.failures[0].kind
        lines += [f"gate {kind} FAILED: {failure.line}" for failure in self.failures]
        later = CLASSES[CLASSES.index(kind) + 1 :]
        return "\n".join(lines + ([f"not judged until that is mended: {', '.join(later)}"] if later else []))


class Unjudged(Exception):
    """The baseline has nothing to judge a class by."""


def judge(run: Run, baseline: Run, limits: Limits) -> Verdict:
    """The first class that fails, with all its failures."""
    passed: list[str] = []
    unjudged: list[tuple[str, str]] = []
    judges: Mapping[str, Callable[[Run, Run, Limits], list[Failure]]] = {
        "parity": _parity, "memory": _memory, "utilisation": _utilisation, "communication": _communication
    }  # fmt: skip
    for kind in CLASSES:
        try:
            failures = judges[kind](run, baseline, limits)
        except Unjudged as reason:
            unjudged.append((kind, f"not judged: {reason}"))
            continue
        if failures:
            return Verdict(failures, passed, unjudged)
        passed.append(kind)
    return Verdict([], passed, unjudged)


def _parity(run: Run, baseline: Run, limits: Limits) -> list[Failure]:
    if not same_batches(run, baseline):
        batches = ["/".join(f"{n:,}" for n in one.tokens_per_step) for one in (run, baseline)]
        line = f"a step has {batches[0]} tokens and the baseline's {batches[1]}: other batches have no parity to judge"
        return [Failure("run", "parity", f"{line}; keep train.global_batch_size and data.sequence_length")]
    shared = sorted(run.steps.keys() & baseline.steps.keys())[: limits.steps]
    if not shared:
        return [Failure("run", "parity", "it shares no step with the baseline")]
    failures: list[Failure] = []
    for name in (LOSS, NORM):
        if any(name in row for row in baseline.steps.values()):
            failures += _apart(run, baseline, name, shared, limits.parity)
    return failures


def _apart(run: Run, baseline: Run, name: str, shared: Sequence[int], parity: Tolerance) -> list[Failure]:
    """Of the losses or the norms, by the rule of promotions; steps that both skipped alike are no numbers to judge."""
    both = {
        step: (run.steps[step][name], baseline.steps[step][name])
        for step in shared
        if name in run.steps[step] and name in baseline.steps[step]
    }
    numbers = {step: pair for step, pair in both.items() if math.isfinite(pair[0]) or not is_close(*pair, 0.0)}
    if both and not numbers:
        line = f"no {NAMES[name]} of the {len(both)} steps compared is a number, in either run"
        return [Failure("run", "parity", line)]
    ours, theirs = ({step: pair[place] for step, pair in numbers.items()} for place in (0, 1))
    relative, absolute = parity.of(name)
    found = parity_failures("run", ours, theirs, relative=relative, absolute=absolute)
    return [replace(one, line=one.line.replace("the loss of", f"the {NAMES[name]} of")) for one in found]


def _memory(run: Run, baseline: Run, limits: Limits) -> list[Failure]:
    ours, theirs = peak_bytes(run), peak_bytes(baseline)
    if theirs is None:
        raise Unjudged("the baseline has no peak memory")
    if ours is None:
        return [Failure("run", "memory", "the run has no peak memory, and the baseline has")]
    most = (1 + limits.memory) * theirs
    if ours <= most:
        return []
    peaks = [f"{value / 1e9:.3f} GB" for value in (ours, theirs, most)]
    line = f"{peaks[0]} at its peak, {ours / theirs:.3f} x the baseline's {peaks[1]}; {peaks[2]} is allowed"
    return [Failure("run", "memory", line)]


def _utilisation(run: Run, baseline: Run, limits: Limits) -> list[Failure]:
    name = next((one for one in UTILISATIONS if typical(baseline, one) is not None), None)
    if name is None:
        raise Unjudged("the baseline has no rate of its steps")
    ours, theirs, word = typical(run, name), typical(baseline, name), UTILISATIONS[name]
    assert theirs is not None
    if ours is None:
        return [Failure("run", "utilisation", f"the run has no {word} ({name}), and the baseline has")]
    least = (1 - limits.utilisation) * theirs
    if ours >= least:
        return []
    line = f"{word} {ours:.4g}, {ours / theirs:.3f} x the baseline's {theirs:.4g}; {least:.4g} is the least allowed"
    return [Failure("run", "utilisation", line)]


def communication_seconds(run: Run) -> dict[str, float]:
    """Axis -> seconds of one step, the medians of its operations summed."""
    names = dict.fromkeys(name for row in run.steps.values() for name in row)
    found: dict[str, float] = {}
    for name in names:
        parts = name.split("/")
        if len(parts) == 4 and parts[0] == "communication" and parts[3] == "seconds":
            found[parts[1]] = found.get(parts[1], 0.0) + (typical(run, name) or 0.0)
    return found


def _communication(run: Run, baseline: Run, limits: Limits) -> list[Failure]:
    """In total: another plan moves seconds between axes; the axes are named with it."""
    ours, theirs = communication_seconds(run), communication_seconds(baseline)
    if not theirs:
        raise Unjudged("the baseline has no times of its collectives")
    if not ours:
        return [Failure("run", "communication", "the run has no times of its collectives, and the baseline has")]
    total, least = sum(ours.values()), sum(theirs.values())
    most = (1 + limits.communication) * least
    if total <= most:
        return []
    axes = ", ".join(
        f"{axis} {ours.get(axis, 0.0):.4g} s for {theirs.get(axis, 0.0):.4g} s" for axis in sorted({*ours, *theirs})
    )
    line = f"{total:.4g} s a step, {most:.4g} s is allowed and the baseline's are {least:.4g} s ({axes})"
    return [Failure("run", "communication", line)]
