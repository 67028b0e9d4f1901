"""What differs between runs, key by key: config, plan, data, code, packages, hosts.

Of each run the start in force at its end is taken; what its own starts changed is `changes`. A key that decides no
number (where files go, what is watched, names) is a label; one that follows from others (the plan's numbers, the
DeepSpeed config) is derived. Both are told apart from the settings, which are what somebody chose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    order = {"setting": 0, "derived": 1, "label": 2}
    return sorted(found, key=lambda one: (order[one.kind], GROUPS.index(one.group)))


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
        yield Fact("hosts", "hosts", "hosts", _hosts(identity["hosts"]))
    if "device" in identity:
        yield Fact("device", "hosts", "device", identity["device"])
    for key in ("cluster", "id", "started", "command"):
        if key in identity:
            yield Fact(key, "hosts" if key == "cluster" else "config", key, identity[key], "label")


def is_unkept(start: Start) -> bool:
    """Whether it ran with uncommitted changes that nobody kept."""
    return str(start.identity.get("git_commit")).endswith("+changes") and not start.patch


def _hosts(hosts: Sequence[str]) -> str:
    """Each once, with how many ranks it had: the order of ranks is the plan's."""
    return ", ".join(f"{host} x{hosts.count(host)}" for host in dict.fromkeys(hosts))


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


def text(found: Sequence[Difference], names: Sequence[str], *, kinds: Sequence[str] = ("setting", "derived")) -> str:
    """Group by group, a line a key."""
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
        return "nothing differs" if len(names) > 1 else ""
    return "\n".join([f"values in the order {' | '.join(names)}", *lines])


def shortened(line: str, *, longest: int = 60) -> str:
    return line if len(line) <= longest else f"{line[: longest - 1]}…"
