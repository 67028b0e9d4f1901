"""A run judged against a baseline, for the CI of people who change plans: outcome, parity, memory, utilisation,
communication.

The classes are judged in this order and one is reported at a time: numbers of a run that broke off, memory or speed of
one that computes other numbers say nothing. What the baseline measured and the run did not fails; what the baseline did
not measure is not judged, and said so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from parallel.promotion import Failure
from telemetry.compare.differences import differences, shortened, shown
from telemetry.compare.divergence import LOSS, NAMES, NORM, Tolerance, distance_words, is_close
from telemetry.compare.outcome import peak_bytes, typical
from telemetry.compare.runs import Run, RunError, same_batches

CLASSES = ("outcome", "parity", "memory", "utilisation", "communication")
ENDED = ("complete", "stopped on request")
# The first that the baseline has. Not the MFU of the matrix rate measured at its start: that is another each time.
UTILISATIONS = {
    "train/mfu": "MFU",
    "train/model_flops_per_s_per_device": "model FLOP/s a device",
    "train/tokens_per_s_per_device": "tokens/s a device",
}
# Of a GPU's memory the allocator counts every byte. Of a CPU's the system counts pages of the whole process, which
# differ by up to 7.6 % between runs of one plan: twice that.
MEMORY, MEMORY_ON_CPU = 0.05, 0.15


@dataclass(frozen=True)
class Limits:
    """parity: of losses and norms over the baseline's first `steps` steps, over which rounding in another order stays
    within it; the others: shares that memory and communication may be above and utilisation below the baseline's.
    memory None: MEMORY, or MEMORY_ON_CPU where either run had a torch for CPUs."""

    parity: Tolerance
    steps: int = 20
    memory: float | None = None
    utilisation: float = 0.10
    communication: float = 0.20


@dataclass(frozen=True)
class Verdict:
    """failures: of the first class that has any; passed: the classes before it; unjudged: (class, why); notes: what the
    reader must know of the comparison."""

    failures: Sequence[Failure]
    passed: Sequence[str]
    unjudged: Sequence[tuple[str, str]]
    notes: Sequence[str] = ()

    def text(self, run: Run, baseline: Run) -> str:
        lines = [*self.notes, *(f"{name}: within its tolerance" for name in self.passed if name != "outcome")]
        lines = [f"gate {line}" for line in [*lines, *(f"{kind}: {line}" for kind, line in self.unjudged)]]
        if not self.failures:
            return "\n".join([*lines, f"gate passed: {run.name} against {baseline.name}"])
        kind = self.failures[0].kind
        lines += [f"gate {kind} FAILED: {failure.line}" for failure in self.failures]
        later = CLASSES[CLASSES.index(kind) + 1 :]
        return "\n".join(lines + ([f"not judged until that is mended: {', '.join(later)}"] if later else []))


class Unjudged(Exception):
    """The baseline has nothing to judge a class by."""


def judge(run: Run, baseline: Run, limits: Limits) -> Verdict:
    """The first class that fails, with all its failures. Raises RunError for a baseline without steps."""
    if not baseline.steps:
        raise RunError(f"{baseline.folder} recorded no step; a baseline needs the metrics of its steps")
    passed: list[str] = []
    unjudged: list[tuple[str, str]] = []
    judges: Mapping[str, Callable[[Run, Run, Limits], list[Failure]]] = {
        "outcome": _outcome, "parity": _parity, "memory": _memory, "utilisation": _utilisation,
        "communication": _communication,
    }  # fmt: skip
    notes = list(_notes(run, baseline, limits))
    for kind in CLASSES:
        try:
            failures = judges[kind](run, baseline, limits)
        except Unjudged as reason:
            unjudged.append((kind, f"not judged: {reason}"))
            continue
        if failures:
            return Verdict(failures, passed, unjudged, notes)
        passed.append(kind)
    return Verdict([], passed, unjudged, notes)


def _notes(run: Run, baseline: Run, limits: Limits) -> Iterator[str]:
    """How many steps are compared, and what else than the plan differs: of another text or rate parity says little."""
    wanted = _wanted(baseline, limits)
    yield f"compared: {len([step for step in wanted if step in run.steps])} of {len(wanted)} steps"
    if baseline.ending not in ENDED:
        yield f"note: the baseline itself is no whole run ({baseline.ending})"
    for group in ("data", "config"):
        found = [one for one in differences([baseline, run]) if one.group == group and one.kind == "setting"]
        values = (f"{one.key} {' -> '.join(shortened(shown(value)) for value in one.values)}" for one in found)
        if found:
            yield f"note: {group} differs: {', '.join(values)}"


def _wanted(baseline: Run, limits: Limits) -> list[int]:
    return sorted(baseline.steps)[: limits.steps]


def _outcome(run: Run, baseline: Run, limits: Limits) -> list[Failure]:
    """A run that broke off is no pass, whatever it computed until then."""
    if run.ending in ENDED:
        return []
    after = f"after step {max(run.steps):,}" if run.steps else "before its first step"
    why = f": {run.error}" if run.error and run.error != run.ending else ""
    return [Failure("run", "outcome", f"the run is not complete but {run.ending}, {after}{why}")]


def _parity(run: Run, baseline: Run, limits: Limits) -> list[Failure]:
    if not same_batches(run, baseline):
        batches = ["/".join(f"{n:,}" for n in one.tokens_per_step) for one in (run, baseline)]
        line = f"a step has {batches[0]} tokens and the baseline's {batches[1]}: other batches have no parity to judge"
        return [Failure("run", "parity", f"{line}; keep train.global_batch_size and data.sequence_length")]
    wanted = _wanted(baseline, limits)
    lacking = [step for step in wanted if step not in run.steps]
    if lacking:
        line = (
            f"it lacks {len(lacking)} of the baseline's first {len(wanted)} steps, the first is step {lacking[0]:,}; "
            "train them, or compare fewer with --parity-steps"
        )
        return [Failure("run", "parity", line)]
    return [failure for name in (LOSS, NORM) for failure in _apart(run, baseline, name, wanted, limits.parity)]


def _apart(run: Run, baseline: Run, name: str, wanted: Sequence[int], parity: Tolerance) -> Iterator[Failure]:
    """Of the losses or the norms, at the first step that is off. Steps that both skipped alike are no numbers to judge;
    behind `wanted` only a number that the run lost is off."""
    theirs = {step: row[name] for step, row in baseline.steps.items() if name in row}
    ours = {step: row[name] for step, row in run.steps.items() if name in row}
    judged = [step for step in wanted if step in theirs]
    lacking = [step for step in judged if step not in ours]
    if lacking:
        many = f"at {len(lacking)} of {len(judged)} steps, the first is step {lacking[0]:,}"
        yield Failure("run", "parity", f"the run has no {NAMES[name]} {many}, and the baseline has")
        return
    if judged and not any(math.isfinite(theirs[step]) or math.isfinite(ours[step]) for step in judged):
        yield Failure(
            "run", "parity", f"no {NAMES[name]} of the {len(judged)} steps compared is a number, in either run"
        )
        return
    off = [step for step in judged if not is_close(ours[step], theirs[step], parity.allowed(name, theirs[step]))]
    if off:
        step, allowed = off[0], parity.allowed(name, theirs[off[0]])
        yield Failure(
            "run", "parity", f"the {NAMES[name]} of step {step:,} is {ours[step]:.8g} and the baseline's "
            f"{theirs[step]:.8g}: {distance_words(ours[step], theirs[step], allowed)} (the first of "
            f"{len(off)} that are off, of {len(judged)} compared)",
        )  # fmt: skip
    later = sorted(ours.keys() & theirs.keys() - set(judged))
    lost = [step for step in later if math.isfinite(theirs[step]) and not math.isfinite(ours[step])]
    if lost:
        yield Failure(
            "run", "parity", f"the {NAMES[name]} of step {lost[0]:,} is {ours[lost[0]]} and the baseline's "
            f"{theirs[lost[0]]:.8g} (the first of {len(lost)} that are no number, of the {len(later)} later steps)",
        )  # fmt: skip


def _memory(run: Run, baseline: Run, limits: Limits) -> list[Failure]:
    ours, theirs = peak_bytes(run), peak_bytes(baseline)
    if theirs is None:
        raise Unjudged("the baseline has no peak memory")
    if ours is None:
        return [Failure("run", "memory", "the run has no peak memory, and the baseline has")]
    share = limits.memory if limits.memory is not None else _memory_share(run, baseline)
    most = (1 + share) * theirs
    if ours <= most:
        return []
    peaks = [f"{value / 1e9:.3f} GB" for value in (ours, theirs, most)]
    line = f"{peaks[0]} at its peak, {ours / theirs:.3f} x the baseline's {peaks[1]}; {peaks[2]} is allowed"
    return [Failure("run", "memory", line)]


def _memory_share(run: Run, baseline: Run) -> float:
    """On a CPU is what ran with a torch that knows nothing else."""
    versions = [str((one.last.identity.get("packages") or {}).get("torch")) for one in (run, baseline)]
    return MEMORY_ON_CPU if any(version.endswith("+cpu") for version in versions) else MEMORY


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
