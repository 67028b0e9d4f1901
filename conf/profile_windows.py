"""telemetry.profile: which steps are profiled, read from what is typed, and on which ranks.

    10          one step
    10-12       three
    [10-12,20]  several windows ("10-12,20" in quotes is the same; bare, Hydra would take the comma for a sweep)

Not here: profiling them (`engine.profile_window`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from conf.schema import Config

Window = tuple[int, int]  # first and last step, both profiled


def profile_windows(steps: Any) -> tuple[Window, ...]:
    """In the order of steps; none for null. ValueError where it is something else, or windows meet."""
    if steps is None:
        return ()
    items = steps if isinstance(steps, list) else str(steps).split(",")
    windows = sorted(_window(str(item).strip()) for item in items)
    for (_, last), (first, _) in pairwise(windows):
        if first <= last:
            raise ValueError(f"step {first} is in two of them; give each step once")
    return tuple(windows)


def _window(text: str) -> Window:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if found is None:
        raise ValueError(f"{text!r} is no step; use a step such as 10, or a window such as 10-12")
    first, last = int(found[1]), int(found[2] or found[1])
    if not 1 <= first <= last:
        raise ValueError(f"{text} is no window: steps count from 1, the first one before the last")
    return first, last


def profile_problems(config: Config, *, world_size: int) -> Iterator[str]:
    """One line for each thing that telemetry.profile may not say."""
    steps, ranks, train_iters = config.telemetry.profile.steps, config.telemetry.profile.ranks, config.train.train_iters
    try:
        windows = profile_windows(steps)
    except ValueError as error:
        yield f"telemetry.profile.steps={_typed(steps)}: {error}"
        return
    if windows and windows[-1][1] > train_iters:
        yield f"telemetry.profile.steps={_typed(steps)} goes beyond train.train_iters={train_iters}"
    outside = [rank for rank in ranks or () if not 0 <= rank < world_size]
    if outside:
        yield (
            f"telemetry.profile.ranks={_typed(ranks)}: {outside[0]} is no rank of {world_size}; "
            f"use {'0' if world_size == 1 else f'0 to {world_size - 1}'}, or null for one a stage"
        )


def _typed(value: Any) -> str:
    return str(value).replace(" ", "").replace("'", "")
