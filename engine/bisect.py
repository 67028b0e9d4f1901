"""Which difference between two runs is the cause of where they part: both are played again from their checkpoints, then
the first run with one thing of the second's at a time.

Three questions in this order: does each replay draw its run's recorded curve again; do the replays part, and at which
step; which of code, config (key by key), data, plan brings that parting when it alone is swapped in. Packages and hosts
cannot be swapped here. `engine.replay` plays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.checkpoint_folder import list_checkpoints
from engine.replay import Code, Recipe, Unplayable, called_from, doubts, ranks_of
from telemetry.compare.differences import Difference, between, shown
from telemetry.compare.divergence import Divergence, Tolerance, describe, divergence
from telemetry.compare.runs import Run, Start

Play = Callable[[Recipe], Run]
BEYOND = 2  # steps played beyond the recorded parting
SWAPPED = ("code", "config", "data", "plan")
NOT_SWAPPED = ("packages", "hosts")
STATE = "state"


@dataclass(frozen=True)
class Swap:
    """brings: whether the difference comes with it; None where it could not be played, and why."""

    what: str
    brings: bool | None
    line: str


@dataclass(frozen=True)
class Bisection:
    """lines: what was played and seen, for the reader; parting: where the replays part; confirmed: the cause in words,
    where one thing alone brought it."""

    lines: Sequence[str]
    parting: Divergence | None = None
    swaps: Sequence[Swap] = ()
    confirmed: str | None = None

    def text(self) -> str:
        swapped = [f"swapped in alone: {swap.what}: {swap.line}" for swap in self.swaps]
        verdict = [f"confirmed: {self.confirmed}"] if self.confirmed else ["not confirmed"]
        return "\n".join([*self.lines, *swapped, *verdict])


@dataclass
class _Side:
    """One run: the start that trained the parting step, and the checkpoint to begin from."""

    run: Run
    start: Start
    step: int  # of the parting, as its own steps count
    checkpoint: Path | None
    begins: int
    notes: list[str] = field(default_factory=list)

    def recipe(self, name: str) -> Recipe:
        last = min(self.step + BEYOND, self.start.config.get("train", {}).get("train_iters", self.step + BEYOND))
        return Recipe(
            name, deepcopy(dict(self.start.config)), Code.of(self.start), ranks_of(self.start), self.checkpoint,
            called_from(self.run), max(last, self.step),
        )  # fmt: skip


def bisect(
    first: Run,
    second: Run,
    found: Divergence,
    tolerance: Tolerance,
    play: Play,
    *,
    most_steps: int = 200,
    begin: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Bisection:
    """first: the good run. begin: checkpoints of later steps are left aside. say: called with a line before each
    replay, which takes its time."""
    if found.steps is None:
        return Bisection(["the two runs do not part: there is nothing to bisect"])
    try:
        sides = [_side(run, step, most_steps, begin) for run, step in zip((first, second), found.steps, strict=True)]
    except Unplayable as reason:
        return Bisection([f"cannot be replayed: {reason}"])
    lines = [note for side in sides for note in side.notes]
    replays = []
    for side, name in zip(sides, ("first", "second"), strict=True):
        say(f"replaying {side.run.name} from step {side.begins} to {side.step}")
        try:
            replays.append(play(side.recipe(name)))
        except Unplayable as reason:
            return Bisection([*lines, f"cannot be replayed: {side.run.name}: {reason}"])
        lines += _beside_record(side, replays[-1], tolerance)
    parting = divergence(replays[0], replays[1], tolerance)
    lines.append(f"replayed: {describe(parting, [side.run.name for side in sides])}")
    if parting.place is None:
        lines.append(
            "the difference does not come back: chance (a device, a race), the hosts, or changes nobody kept; "
            "or it came before the checkpoints that are left"
        )
        return Bisection(lines, parting)
    swaps = list(_swaps(sides, replays[0], tolerance, play, say))
    return Bisection([*lines, *_unswapped(sides)], parting, swaps, _confirmed(sides, swaps))


def _side(run: Run, step: int, most_steps: int, begin: int | None) -> _Side:
    """Where to begin: the nearest checkpoint before the step; else, where the way is short enough, the run's start."""
    start = run.start_at(step)
    if not start.config:
        raise Unplayable(f"{run.name} kept no config")
    latest = step - 1 if begin is None else min(begin, step - 1)
    before = [(at, path) for at, path in list_checkpoints(run.folder / "checkpoints") if at <= latest]
    begins, checkpoint = before[-1] if before else _origin(run, start)
    if step - begins > most_steps:
        kept = f"its nearest checkpoint is step {begins}" if begins else "it has no checkpoint before that any more"
        raise Unplayable(
            f"{run.name} parts at step {step}, but {kept}: {step - begins} steps to play; --bisect-steps allows "
            f"{most_steps} (checkpoint.keep_last and keep_every keep more)"
        )
    return _Side(run, start, step, checkpoint, begins, doubts(run, start))


def _origin(run: Run, start: Start) -> tuple[int, Path | None]:
    """(step, checkpoint) that a run was started from: of another run's, where its config says so, else none."""
    given = start.config.get("resume")
    if given in (None, "never", "auto"):
        return 0, None
    path = called_from(run) / Path(given).expanduser()
    step = next((event["step"] for event in run.events if event.get("event") == "resume"), None)
    for folder in (path.parent, path / "checkpoints", path):
        for at, checkpoint in list_checkpoints(folder):
            if checkpoint == path or (step == at and path.name != checkpoint.name and folder != path.parent):
                return at, checkpoint
    raise Unplayable(f"{run.name} was started from {path}, where its checkpoint is gone")


def _beside_record(side: _Side, replay: Run, tolerance: Tolerance) -> Iterator[str]:
    """Whether a replay read the same text and drew the same curve."""
    name, was = side.run.name, side.start.identity.get("corpus_fingerprint")
    now = replay.last.identity.get("corpus_fingerprint")
    if was is not None and was != now:
        yield f"{name}: its corpus is not there any more: the replay read other text ({now} for {was})"
    again = divergence(side.run, replay, tolerance)
    if again.place is None:
        yield f"{name}: its replay from step {side.begins} draws its recorded curve again"
    else:
        yield f"{name}: its replay does not draw its recorded curve: {describe(again, ['the record', 'the replay'])}"


def _swaps(
    sides: Sequence[_Side], base: Run, tolerance: Tolerance, play: Play, say: Callable[[str], None]
) -> Iterator[Swap]:
    """Group by group; a group that brings the difference and has several keys, key by key. The state last."""
    settings = [one for one in between([side.start for side in sides]) if one.kind == "setting"]
    brought = False
    for group in SWAPPED:
        found = [one for one in settings if one.group == group]
        if not found:
            continue
        whole = _played(group, found, sides, base, tolerance, play, say)
        brought |= bool(whole.brings)
        keys = [one for one in found if not one.key.endswith("_fingerprint")]
        if whole.brings and group in ("config", "data") and len(keys) > 1:
            for one in keys:
                yield _played(group, [one], sides, base, tolerance, play, say)
        else:
            yield whole
    first, second = sides
    if not brought and first.checkpoint is not None and second.checkpoint is not None:
        recipe = replace(first.recipe("state"), checkpoint=second.checkpoint)
        what = f"{STATE}: {second.run.name}'s checkpoint of step {second.begins}"
        seen = _seen(what, recipe, base, tolerance, play, say)
        earlier = "; the cause came before it: --bisect-from STEP begins at an earlier checkpoint"
        yield replace(seen, line=seen.line + earlier) if seen.brings else seen


def _played(
    group: str, found: Sequence[Difference], sides: Sequence[_Side], base: Run, tolerance: Tolerance, play: Play,
    say: Callable[[str], None],
) -> Swap:  # fmt: skip
    keys = [one.key for one in found]
    what = f"{group}: " + ", ".join(f"{one.key} {shown(one.values[0])} -> {shown(one.values[1])}" for one in found)
    if all(key.endswith("_fingerprint") for key in keys):
        return Swap(what, None, "cannot be replayed: the text behind the same data.* was another")
    name = f"{group}-{keys[0].replace('.', '-')}" if len(keys) == 1 else group
    return _seen(what, swapped(sides[0].recipe(name), group, keys, sides[1].start), base, tolerance, play, say)


def swapped(recipe: Recipe, group: str, keys: Sequence[str], other: Start) -> Recipe:
    """The recipe with those keys of a group taken from another start."""
    if group == "code":
        return replace(recipe, code=Code.of(other))
    config = deepcopy(dict(recipe.config))
    for key in keys:
        _take(config, other.config, key.split("."))
    ranks = ranks_of(other) if group == "plan" else recipe.ranks
    return replace(recipe, config=config, ranks=ranks)


def _take(config: dict[str, Any], other: Mapping[str, Any], path: Sequence[str]) -> None:
    """config[path] = other[path]; a list is taken whole, and what the other lacks is taken away."""
    name = path[0]
    if name not in config and name not in other:
        return  # a fingerprint: no knob
    if isinstance(config.get(name), dict) and isinstance(other.get(name), Mapping) and len(path) > 1:
        _take(config[name], other[name], path[1:])
    elif name in other:
        config[name] = deepcopy(other[name])
    else:
        config.pop(name, None)


def _seen(
    what: str, recipe: Recipe, base: Run, tolerance: Tolerance, play: Play, say: Callable[[str], None]
) -> Swap:  # fmt: skip
    say(f"replaying with {what}")
    try:
        found = divergence(base, play(recipe), tolerance)
    except Unplayable as reason:
        return Swap(what, None, f"cannot be replayed: {reason}")
    if not found.shared:
        return Swap(what, None, f"shares no {found.axis} with the first run's replay")
    if found.place is None:
        return Swap(what, False, "does not bring the difference")
    return Swap(what, True, f"brings the difference, at {found.axis} {found.place}")


def _unswapped(sides: Sequence[_Side]) -> Iterator[str]:
    for one in between([side.start for side in sides]):
        if one.group in NOT_SWAPPED and one.kind == "setting":
            values = " -> ".join(shown(value) for value in one.values)
            yield f"cannot be swapped here: {one.group}: {one.key} {values}"


def _confirmed(sides: Sequence[_Side], swaps: Sequence[Swap]) -> str | None:
    """Only where exactly one thing brings it: two that do are two questions. A state is no cause but its trace."""
    brings = [swap for swap in swaps if swap.brings and not swap.what.startswith(STATE)]
    if len(brings) != 1:
        return None
    first, second = sides
    return f"{brings[0].what}: swapped alone into {first.run.name}, it brings the difference to {second.run.name}"
