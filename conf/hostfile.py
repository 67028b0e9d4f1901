"""A hostfile, as DeepSpeed reads it, for launch/multinode.sh: which hosts a run gets, or why not, before it starts.

    w0 slots=8          # a host that ssh reaches without a password, and the ranks that it takes
    w1 slots=8

What DeepSpeed refuses is refused here by line and text. So is what it accepts though it cannot work: a missing file
(it would run on this machine alone), slots=0, a port, a byte order mark, names that pdsh would take for something else.
Not here: whether the hosts answer (launch/).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from conf.load import ConfigError

Slots = dict[str, list[int]]  # host -> the devices that it gives; in the order of the ranks

MOST_SLOTS = 4096
LINE = re.compile(r"^(\S+)\s+slots=(\d+)(?=\s|#|$)", re.ASCII)
NAME = re.compile(r"(?:[\w.-]+@)?[A-Za-z0-9][\w.-]*", re.ASCII)  # pdsh expands w[0-3], and -w, ^w and /w/ are others


def read(path: Path) -> Slots:
    """Host -> its slots. Raises ConfigError with every bad line."""
    try:
        text = path.read_text()  # CRLF becomes a line's end
    except OSError as error:
        raise ConfigError([f"hostfile {path}: {error.strerror}; write one line `NAME slots=RANKS` a host"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"hostfile {path} is not text in UTF-8; save it as that"]) from None
    found: Slots = {}
    lines: dict[str, int] = {}
    problems = []
    for number, line in enumerate(text.split("\n"), start=1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        problem, match = _problem(entry), LINE.match(entry)
        if problem is None and match is not None and match[1] in found:
            problem = f"{match[1]} is in line {lines[match[1]]} already; give it all its slots there"
        if problem is not None:
            problems.append(f"hostfile {path} line {number}: {entry!r}: {problem}")
        elif match is not None:
            found[match[1]] = list(range(int(match[2])))
            lines[match[1]] = number
    if not found and not problems:
        problems = [f"hostfile {path} names no host; write one line `NAME slots=RANKS` a host"]
    if problems:
        raise ConfigError(problems)
    return found


def _problem(entry: str) -> str | None:
    """What is wrong with a line."""
    name = entry.split()[0]
    if entry.startswith("\ufeff"):
        return "it begins with a byte order mark, which would be part of the name; save the file without"
    if ":" in name:
        return "a port does not belong here; use -p PORT for all hosts, or Port for this one in ~/.ssh/config"
    if not NAME.fullmatch(name):
        return f"{name} is not a host's name; write each host in a line of its own"
    match = LINE.match(entry)
    if match is None:
        return "it is not `NAME slots=RANKS` (small letters, a whole number)"
    if int(match[2]) > MOST_SLOTS:
        return f"no host has {match[2]} devices; give the ranks that it takes, {MOST_SLOTS} at the most"
    if int(match[2]) == 0:
        return "it has no slot; give it 1 or more, or take the line out"
    return None


def chosen(hosts: Slots, *, include: str = "", exclude: str = "") -> Slots:
    """The hosts and slots that DeepSpeed's filters leave: NAME[:SLOT[,SLOT...]][@NAME...]. Raises ConfigError."""
    if include and exclude:
        raise ConfigError(["-i and -e exclude each other; say what to include, or what to leave out"])
    text, flag = (include, "-i") if include else (exclude, "-e")
    named: dict[str, set[int]] = {}
    for node in text.split("@") if text else []:
        name, _, slots = node.partition(":")
        if name not in hosts:
            users = "; write users in ~/.ssh/config, as @ separates hosts here" if any("@" in h for h in hosts) else ""
            raise ConfigError([f"{flag} {text}: {name!r} is not in the hostfile; it has {', '.join(hosts)}{users}"])
        if ":" in node and not re.fullmatch(r"\d+(,\d+)*", slots):
            raise ConfigError([f"{flag} {text}: {slots!r} are not slots; list them, as in {name}:0,2"])
        if name in named and (not slots or named[name] == set(hosts[name])):
            raise ConfigError([f"{flag} {text}: {name} is named twice; list its slots once"])
        wanted = {int(slot) for slot in slots.split(",")} if slots else set(hosts[name])
        beyond = sorted(wanted - set(hosts[name]))
        if beyond:
            last = len(hosts[name]) - 1
            raise ConfigError([f"{flag} {text}: {name} has no slot {beyond[0]}; its slots are 0 to {last}"])
        named[name] = named.get(name, set()) | wanted
    if include:
        left = {name: sorted(named[name]) for name in hosts if name in named}
    else:
        left = {name: [one for one in slots if one not in named.get(name, ())] for name, slots in hosts.items()}
    left = {name: slots for name, slots in left.items() if slots}
    if not left:
        raise ConfigError([f"{flag} {text} leaves no host of {', '.join(hosts)}"])
    return left


def ranks(hosts: Mapping[str, list[int]]) -> int:
    """One a slot."""
    return sum(map(len, hosts.values()))


def plan_problem(hosts: Mapping[str, list[int]], *, tp: int, pp: int) -> str | None:
    """Why so many ranks cannot share out tp x pp; None where they can."""
    count = ranks(hosts)
    if count % (tp * pp) == 0:
        return None
    slots = ", ".join(f"{name} {len(slots)}" for name, slots in hosts.items())
    more = count + -count % (tp * pp)
    return (
        f"parallel.tp={tp} x parallel.pp={pp} = {tp * pp} does not divide the {count} slots of the hosts ({slots}); "
        f"give {more} slots, or {more - tp * pp}" if more > tp * pp else
        f"parallel.tp={tp} x parallel.pp={pp} = {tp * pp} ranks but the hosts have {count} slots ({slots}); give {more}"
    )  # fmt: skip
