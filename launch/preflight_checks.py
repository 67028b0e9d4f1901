"""What must be the same on all hosts, and what they must share: answers of check_host.py -> a cell for each host.

Pure: every function takes host -> what it answered. The majority is the norm, of equals the first host's; who differs
is told by what. Not here: what a host must have of its own (preflight_machine.py), and how fast it is
(preflight_rates.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from launch.preflight_table import Cell, good, named, wrong

T = TypeVar("T")
Answers = Mapping[str, Mapping[str, Any]]

CLOCK_S = 1.0
SHOWN = 3  # differences that a cell names; the rest is counted


def norm(values: Iterable[T]) -> T | None:
    """What most have; of equals what came first; None of none."""
    return next((value for value, _ in Counter(values).most_common(1)), None)


def usual(values: Mapping[str, T]) -> tuple[T | None, str]:
    """The norm, and the hosts that keep to it in words."""
    most = norm(values.values())
    return most, named((host for host, value in values.items() if value == most), list(values))


def some(lines: Sequence[str]) -> str:
    rest = len(lines) - SHOWN
    return "; ".join([*lines[:SHOWN], *([f"and {rest} more"] if rest > 0 else [])])


def python(facts: Answers) -> dict[str, Cell]:
    found = {host: one["python"] for host, one in facts.items()}
    most, others = usual(found)
    remedy = "make .venv with the same Python on all hosts (make train PYTHON=...), or share one"
    return {
        host: good(mine) if mine == most else wrong(f"{mine} here, {most} on {others}", remedy)
        for host, mine in found.items()
    }


def packages(facts: Answers) -> dict[str, Cell]:
    """Each package by itself: its version on most hosts is the norm."""
    lines: dict[str, list[str]] = {host: [] for host in facts}
    names = sorted({name for one in facts.values() for name in one["packages"]})
    for name in names:
        versions = {host: one["packages"].get(name) for host, one in facts.items()}
        most, others = usual(versions)
        for host, version in versions.items():
            if version != most:
                lines[host].append(f"{name} {version or 'missing'} here, {most or 'missing'} on {others}")
            elif version is None:
                lines[host].append(f"{name} missing")
    remedy = "install requirements.txt into .venv there as on the others (rm -r .venv; make train), or share one .venv"
    return {host: wrong(some(of), remedy) if of else good(f"{len(names)} packages") for host, of in lines.items()}


def code(facts: Answers, views: Answers) -> dict[str, Cell]:
    """The commit, and the files that a run reads code or config from, so that uncommitted changes show."""
    remedy = "bring the checkout there to the others' commit and changes (git status there), or share one"
    commits = {host: one["commit"] for host, one in views.items()}
    files = {host: tuple(sorted(facts[host]["code"].items())) for host in views}
    (commit, of_commit), (most, others) = usual(commits), usual(files)
    of_most = dict(most or ())
    cells = {}
    for host in views:
        lines, mine = [], dict(files[host])
        if commits[host] != commit:
            lines.append(f"commit {_short(commits[host])} here, {_short(commit)} on {of_commit}")
        changed = sorted(path for path in mine.keys() | of_most.keys() if mine.get(path) != of_most.get(path))
        if changed:
            listed = ", ".join(changed[:SHOWN]) + (f" and {len(changed) - SHOWN} more" if changed[SHOWN:] else "")
            lines.append(f"{listed} {'is' if len(changed) == 1 else 'are'} not as on {others}")
        cells[host] = wrong("; ".join(lines), remedy) if lines else good(_short(commit))
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
        most, others = usual(values)
        for host, value in values.items():
            if value != most:
                how = "is not set here" if value is None else "is set here" if most is None else "has another value"
                lines[host].append(f"{name} {how}, unlike on {others}")
    remedy = "set it before launch/multinode.sh or in .deepspeed_env, which is for all hosts, or take it out there"
    return {host: wrong(some(of), remedy) if of else good() for host, of in lines.items()}


def config(views: Answers) -> dict[str, Cell]:
    """The fingerprint of what determines a run's numbers, and which knobs make it differ."""
    prints = {host: one["fingerprint"] for host, one in views.items()}
    most, others = usual(prints)
    norms = [one["knobs"] for one in views.values() if one["fingerprint"] == most]
    remedy = "a file of conf/ or a variable that the config names differs there: make it equal, or write the value out"
    cells = {}
    for host, one in views.items():
        mine, theirs = one["knobs"], norms[0]
        keys = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
        lines = [f"{key}={mine.get(key)} here, {theirs.get(key)} on {others}" for key in keys]
        cells[host] = good(prints[host][:12]) if prints[host] == most else wrong(some(lines), remedy)
    return cells


def shared_folder(
    name: str, knob: str, paths: Mapping[str, str], written: Answers, seen: Answers, *, nodes: Sequence[str]
) -> dict[str, Cell]:
    """Each host left a token there and looked for all. nodes: hosts by the number of their token.

    The norm is the set of tokens that most see: a host on another disk sees its own, and is not seen by the others.
    """
    most, others = usual(paths)
    failed = {host: written[host]["problems"][name] for host in paths if name in written[host]["problems"]}
    sees = {
        host: frozenset(nodes).difference(failed, (nodes[number] for number in seen[host]["unseen"][name]))
        for host in paths
    }
    meeting = norm(sees[host] for host in paths if host not in failed) or frozenset()
    remedy = f"mount the shared disk there, or name a folder that all hosts share with {knob}"
    late = "another disk, or a file system that shows files late"
    cells = {}
    for host, path in paths.items():
        missing = meeting - sees[host]
        if path != most:
            cells[host] = wrong(f"it is {path} here, {most} on {others}", f"give {knob} the same value on all hosts")
        elif host in failed:
            cells[host] = wrong(f"{path} cannot be written here: {failed[host]}", remedy)
        elif missing:
            cells[host] = wrong(f"{path} here lacks what {named(missing, nodes)} wrote: {late}", remedy)
        elif host not in meeting:
            cells[host] = wrong(f"what it wrote to {path} is not seen on {named(meeting, nodes)}: {late}", remedy)
        else:
            cells[host] = good()
    return cells


def clocks(offsets: Mapping[str, tuple[float, float]]) -> dict[str, Cell]:
    """offsets: host -> (seconds its clock is ahead of the caller's, half the round trip), which may be off by that."""

    def apart(host: str, other: str) -> float:
        (mine, error), (theirs, other_error) = offsets[host], offsets[other]
        return max(0.0, abs(mine - theirs) - error - other_error)

    if not offsets:
        return {}
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
