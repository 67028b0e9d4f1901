"""What must be the same on all hosts, and what they must share: answers of check_host.py -> a cell for each host.

Pure: every function takes host -> what it answered. The majority is the norm, of equals the first host's; who differs
is told by what. Not here: what a host must have of its own (preflight_machine.py), and how fast it is
(preflight_rates.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from launch.preflight_table import Cell, good, named, wrong

T = TypeVar("T")
Answers = Mapping[str, Mapping[str, Any]]

CLOCK_S = 1.0
SHOWN = 3  # differences that a cell names; the rest is counted


def norm(values: Iterable[T]) -> T:
    """What most have; of equals what came first."""
    return Counter(values).most_common(1)[0][0]


def compared(
    values: Mapping[str, T], *, about: str, differs: Callable[[T, T, str], str], remedy: str
) -> dict[str, Cell]:
    """differs(mine, norm, the hosts of the norm): what a host that differs is told."""
    usual = norm(values.values())
    others = named((host for host, value in values.items() if value == usual), list(values))
    return {
        host: good(about.format(usual)) if value == usual else wrong(differs(value, usual, others), remedy)
        for host, value in values.items()
    }


def some(lines: Sequence[str]) -> str:
    rest = len(lines) - SHOWN
    return "; ".join([*lines[:SHOWN], *([f"and {rest} more"] if rest > 0 else [])])


def python(facts: Answers) -> dict[str, Cell]:
    return compared(
        {host: one["python"] for host, one in facts.items()},
        about="{}",
        differs=lambda mine, usual, others: f"{mine} here, {usual} on {others}",
        remedy="make .venv with the same Python on all hosts (make train PYTHON=...), or share one",
    )


def packages(facts: Answers) -> dict[str, Cell]:
    """Each package by itself: its version on most hosts is the norm."""
    lines: dict[str, list[str]] = {host: [] for host in facts}
    names = sorted({name for one in facts.values() for name in one["packages"]})
    for name in names:
        versions = {host: one["packages"].get(name) for host, one in facts.items()}
        usual = norm(versions.values())
        others = named((host for host, version in versions.items() if version == usual), list(versions))
        for host, version in versions.items():
            if version != usual:
                lines[host].append(f"{name} {version or 'missing'} here, {usual or 'missing'} on {others}")
            elif version is None:
                lines[host].append(f"{name} missing")
    remedy = "install requirements.txt into .venv there as on the others (rm -r .venv; make train), or share one .venv"
    return {host: wrong(some(of), remedy) if of else good(f"{len(names)} packages") for host, of in lines.items()}


def code(facts: Answers, views: Answers) -> dict[str, Cell]:
    """The commit, and the files that a run reads code or config from, so that uncommitted changes show."""
    remedy = "bring the checkout there to the others' commit and changes (git status there), or share one"
    files = {host: tuple(sorted(facts[host]["code"].items())) for host in views}
    commits = {host: one["commit"] for host, one in views.items()}
    usual, usual_commit = dict(norm(files.values())), norm(commits.values())
    others = named((host for host in views if dict(files[host]) == usual), list(views))
    cells = {}
    for host in views:
        lines = []
        if commits[host] != usual_commit:
            lines.append(f"commit {_short(commits[host])} here, {_short(usual_commit)} on most")
        mine = dict(files[host])
        changed = sorted(path for path in mine.keys() | usual.keys() if mine.get(path) != usual.get(path))
        if changed:
            listed = ", ".join(changed[:SHOWN]) + (f" and {len(changed) - SHOWN} more" if changed[SHOWN:] else "")
            lines.append(f"{listed} {'is' if len(changed) == 1 else 'are'} not as on {others}")
        cells[host] = wrong("; ".join(lines), remedy) if lines else good(_short(usual_commit))
    return cells


def _short(commit: str | None) -> str:
    if commit is None:
        return "no git checkout"
    name, plus, rest = commit.partition("+")
    return name[:10] + plus + rest


def environment(views: Answers) -> dict[str, Cell]:
    """Of the variables that travel (launch/environment.py), those that a rank there would see otherwise."""
    lines: dict[str, list[str]] = {host: [] for host in views}
    names = sorted({name for one in views.values() for name in one["environ"]})
    for name in names:
        values = {host: one["environ"].get(name) for host, one in views.items()}
        usual = norm(values.values())
        others = named((host for host, value in values.items() if value == usual), list(values))
        for host, value in values.items():
            if value != usual:
                how = "is not set here" if value is None else "is set here" if usual is None else "has another value"
                lines[host].append(f"{name} {how}, unlike on {others}")
    remedy = "set it before launch/multinode.sh or in .deepspeed_env, which is for all hosts, or take it out there"
    return {host: wrong(some(of), remedy) if of else good() for host, of in lines.items()}


def config(views: Answers) -> dict[str, Cell]:
    """The fingerprint of what determines a run's numbers, and which knobs make it differ."""
    prints = {host: one["fingerprint"] for host, one in views.items()}
    usual = norm(prints.values())
    of_usual = next(one["knobs"] for one in views.values() if one["fingerprint"] == usual)
    others = named((host for host, value in prints.items() if value == usual), list(views))
    remedy = (
        "a file of conf/ or a variable that the config names differs there: make them equal, or write the value out"
    )
    cells = {}
    for host, one in views.items():
        keys = sorted(one["knobs"].keys() | of_usual.keys())
        lines = [
            f"{key}={one['knobs'].get(key)} here, {of_usual.get(key)} on {others}"
            for key in keys
            if one["knobs"].get(key) != of_usual.get(key)
        ]
        cells[host] = good(usual[:12]) if one["fingerprint"] == usual else wrong(some(lines), remedy)
    return cells


def shared_folder(
    name: str, knob: str, paths: Mapping[str, str], written: Answers, seen: Answers, *, nodes: Sequence[str]
) -> dict[str, Cell]:
    """Each host left a token there and looked for all. nodes: hosts by the number of their token."""
    usual = norm(paths.values())
    by_path = named((host for host, path in paths.items() if path == usual), list(paths))
    remedy = f"mount the shared disk there, or name a folder that all hosts share with {knob}"
    cells = {}
    for host, path in paths.items():
        problem = written[host]["problems"].get(name)
        # A token that was never left is its own host's fault.
        missing = [nodes[n] for n in seen[host]["unseen"][name] if not written[nodes[n]]["problems"].get(name)]
        if path != usual:
            cells[host] = wrong(f"it is {path} here, {usual} on {by_path}", f"give {knob} the same value on all hosts")
        elif problem is not None:
            cells[host] = wrong(f"{path} cannot be written here: {problem}", remedy)
        elif missing:
            where = "another disk, or a file system that shows files late"
            cells[host] = wrong(f"{path} here lacks what {named(missing, nodes)} wrote: {where}", remedy)
        else:
            cells[host] = good()
    return cells


def clocks(offsets: Mapping[str, tuple[float, float]]) -> dict[str, Cell]:
    """offsets: host -> (seconds its clock is ahead of the caller's, half the round trip), which may be off by that."""

    def apart(host: str, other: str) -> float:
        (mine, error), (theirs, other_error) = offsets[host], offsets[other]
        return max(0.0, abs(mine - theirs) - error - other_error)

    reference = max(offsets, key=lambda host: sum(apart(host, other) <= CLOCK_S for other in offsets))
    cells = {}
    for host, (offset, error) in offsets.items():
        ahead = offset - offsets[reference][0]
        if apart(host, reference) <= CLOCK_S:
            cells[host] = good(f"within {CLOCK_S:g} s")
        else:
            way = "ahead of" if ahead > 0 else "behind"
            told = f"{abs(ahead):.1f} s {way} {reference} (the round trip leaves {error + offsets[reference][1]:.2f} s)"
            cells[host] = wrong(told, "set the clock there: chronyc makestep, or start chronyd or systemd-timesyncd")
    return cells
