"""What differs between runs, key by key: config, plan, data, code, packages, hosts.

Of each run the start in force at its end is taken; what its own starts changed is `changes`. A key that decides no
number (where files go, what is watched, names) is a label; one that follows from others (the plan's numbers, the
DeepSpeed config) is derived. Both are told apart from the settings, which are what somebody chose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from telemetry.compare.runs import Run, Start

GROUPS = ("config", "plan", "data", "code", "packages", "hosts")
# As conf.load.fingerprint leaves them out, and recipes' own groups.
LABEL_ROOTS = ("run", "telemetry", "benchmark", "promote", "probe", "compare", "plan", "checkpoint", "resume", "alerts")
LABELS = (
    "model.name", "parallel.name", "parallel.version", "cluster.name", "cluster.rates.source", "data.cache_dir",
    "data.num_workers", "data.wait_timeout_s", "cluster.timeout_s", "cluster.hang_timeout_s",
)  # fmt: skip
PLAN_KEYS = ("parallel.", "zero.", "train.micro_batch_size")
# What a reader asks for -> the part of a start's record that tells it.
SECTIONS = {"config": "config", "plan": "plan", "data": "corpus_fingerprint", "code": "code", "packages": "packages",
            "hosts": "hosts"}  # fmt: skip
MISSING = "(absent)"
UNKEPT = "uncommitted changes, not kept"
UNTOLD = ("profile.standing", "profile.determined", "predicted", "warnings")  # of plan.json: predictions and words


@dataclass(frozen=True)
class Difference:
    """values: one a run; kind: setting, derived or label."""

    group: str
    key: str
    values: Sequence[Any]
    kind: str = "setting"


@dataclass(frozen=True)
class Fact:
    """section: the part of a run's record that it stands in; a run that lacks the part says nothing of it."""

    section: str
    group: str
    key: str
    value: Any
    kind: str = "setting"


def differences(runs: Sequence[Run]) -> list[Difference]:
    """All keys whose values are not the same in all runs, settings first, in the order of GROUPS."""
    return between([run.last for run in runs])


def between(starts: Sequence[Start]) -> list[Difference]:
    """The same of any starts. Of wandb's files and of older versions parts are missing: these differ in nothing."""
    parts = [{(fact.group, fact.key): fact for fact in facts(start)} for start in starts]
    sections = [{fact.section for fact in part.values()} for part in parts]
    found = []
    for place in dict.fromkeys(place for part in parts for place in part):
        known = [part.get(place) for part in parts]
        fact = next(one for one in known if one is not None)
        values = [MISSING if one is None else one.value for one in known]
        if all(fact.section in one for one in sections) and any(value != values[0] for value in values):
            found.append(Difference(*place, values, fact.kind))
    found = [replace(one, kind="derived") if _follows(one, found) else one for one in found]
    order = {"setting": 0, "derived": 1, "label": 2}
    return sorted(found, key=lambda one: (order[one.kind], GROUPS.index(one.group)))


def changes_text(run: Run) -> list[str]:
    """What each later start chose otherwise, a line a start."""
    lines = []
    for start, changed in changes(run):
        settings = [one for one in changed if one.kind == "setting"]
        values = [f"{one.key} {' -> '.join(shortened(shown(value)) for value in one.values)}" for one in settings]
        if values:
            lines.append(f"{run.name}: start {start.number} changed, from step {start.step:,} on: {', '.join(values)}")
    return lines


def _follows(one: Difference, found: Sequence[Difference]) -> bool:
    """Fingerprints of the corpus are of its text and of what selects and orders it: where that was chosen otherwise,
    they say nothing of the text."""
    if one.key not in ("corpus_fingerprint", "tokenizer_fingerprint"):
        return False
    chosen = [other.key for other in found if other.kind == "setting"]
    return any(key.startswith("data.") or (key == "seed" and one.key == "corpus_fingerprint") for key in chosen)


def changes(run: Run) -> list[tuple[Start, list[Difference]]]:
    """Of each later start of a run what it changed against the one before, labels left out."""
    pairs = pairwise(run.starts)
    found = [(after, [one for one in between([before, after]) if one.kind != "label"]) for before, after in pairs]
    return [(start, changed) for start, changed in found if changed]


def facts(start: Start) -> Iterator[Fact]:
    """Everything that a start was made of."""
    identity = start.identity
    for key, value in leaves(start.config):
        yield Fact("config", group_of(key), key, value, "label" if is_label(key) else "setting")
    for key in ("corpus_fingerprint", "tokenizer_fingerprint"):
        if key in identity:
            yield Fact(key, "data", key, identity[key])
    if "git_commit" in identity:
        yield Fact("code", "code", "git_commit", identity["git_commit"])
        yield Fact("code", "code", "patch", start.patch or (UNKEPT if is_unkept(start) else None))
    for key, value in leaves(start.plan):
        if not key.startswith(UNTOLD):
            yield Fact("plan", "plan", f"plan.{key}", value, "label" if key.startswith("profile.") else "derived")
    for key, value in leaves(start.deepspeed):
        yield Fact("deepspeed", "config", f"deepspeed.{key}", value, "derived")
    for key, value in (identity.get("packages") or {}).items():
        yield Fact("packages", "packages", key, value)
    if "python" in identity:
        yield Fact("python", "packages", "python", identity["python"])
    if "hosts" in identity:
        hosts = identity["hosts"]
        yield Fact("hosts", "hosts", "hosts", ", ".join(sorted(set(hosts))))
        counts = ", ".join(f"{host} x{hosts.count(host)}" for host in dict.fromkeys(hosts))
        yield Fact("hosts", "hosts", "ranks of each host", counts, "derived")  # the plan's
    if "device" in identity:
        yield Fact("device", "hosts", "device", identity["device"])
    for key in ("cluster", "id", "started", "command"):
        if key in identity:
            yield Fact(key, "hosts" if key == "cluster" else "config", key, identity[key], "label")


def is_unkept(start: Start) -> bool:
    """Whether it ran with uncommitted changes that nobody kept."""
    return str(start.identity.get("git_commit")).endswith("+changes") and not start.patch


def group_of(key: str) -> str:
    """config, plan or data: what a knob belongs to."""
    if key.startswith("data."):
        return "data"
    return "plan" if key.startswith(PLAN_KEYS) else "config"


def is_label(key: str) -> bool:
    return key.split(".")[0] in LABEL_ROOTS or key in LABELS


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value); lists of plain values are one value, as one types them."""
    if isinstance(value, Mapping) and (value or not prefix):
        for name, child in value.items():
            yield from leaves(child, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(value, list) and any(isinstance(child, (Mapping, list)) for child in value):
        for place, child in enumerate(value):
            yield from leaves(child, f"{prefix}.{place}")
    else:
        yield prefix, value


def shown(value: Any) -> str:
    """In one line; a patch by its first changed file."""
    if value is None:
        return "none"
    if isinstance(value, str) and "\n" in value:
        files = [line.split(" b/")[-1] for line in value.splitlines() if line.startswith("diff --git ")]
        size = sum(line[:1] in "+-" and line[:3] not in ("+++", "---") for line in value.splitlines())
        return f"{size} changed lines in {', '.join(files) or 'no file'}"
    return f"{value:g}" if isinstance(value, float) and abs(value) < 1e15 else str(value)


def unknown_groups(starts: Sequence[Start], names: Sequence[str]) -> list[str]:
    """What could not be compared, a line a run: wandb's files and older versions kept less."""
    lines = []
    for start, name in zip(starts, names, strict=True):
        known = {fact.section for fact in facts(start)}
        missing = [word for word, section in SECTIONS.items() if section not in known]
        if missing:
            lines.append(f"not compared: {', '.join(missing)}: not known of {name}")
    return lines


def text(
    found: Sequence[Difference], runs: Sequence[Run], *, kinds: Sequence[str] = ("setting", "derived")
) -> str:  # fmt: skip
    """Group by group, a line a key; then what could not be compared."""
    names = [run.name for run in runs]
    unknown = unknown_groups([run.last for run in runs], names) if len(names) > 1 else []
    lines = []
    for group in GROUPS:
        rows = [one for one in found if one.group == group and one.kind in kinds]
        if rows:
            lines.append(f"{group}:")
            width = max(len(one.key) for one in rows)
            for one in rows:
                values = "  |  ".join(shortened(shown(value)) for value in one.values)
                lines.append(f"  {one.key:<{width}}  {values}{'  (follows)' if one.kind == 'derived' else ''}")
    if not lines:
        same = "nothing differs, of what both kept" if unknown else "nothing differs"
        return "\n".join([same, *unknown]) if len(names) > 1 else ""
    return "\n".join([f"values in the order {' | '.join(names)}", *lines, *unknown])


def shortened(line: str, *, longest: int = 60) -> str:
    return line if len(line) <= longest else f"{line[: longest - 1]}…"
