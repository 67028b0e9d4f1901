"""A plan by a short name such as tp2_pp2_zero1_sp, as `benchmark.plans` lists them. Pure Python.

Not here: what follows from the knobs that a name sets (`parallel.plan`), and profiles, which have files
(`parallel.profile`).
"""

from __future__ import annotations

import copy
import math
import re

from conf.schema import Config, ParallelConfig, Schedule
from parallel.rungs import composed

Mesh = tuple[int, int, int]  # tp, pp, dp
PARTS = {"tp": r"tp(\d+)", "pp": r"pp(\d+)", "dp": r"dp(\d+)", "zero": r"zero([0-3])"}


def plan_config(name: str, config: Config) -> tuple[Config, Mesh]:
    """`config` split as a name such as "tp2_pp2_zero1_sp" says, on as much of its cluster as that needs; and its mesh.

    Raises ValueError where the name has a part that is none of tpN, ppN, dpN, zeroN, sp, a schedule.
    """
    numbers = {"tp": 1, "pp": 1, "dp": 1, "zero": 0}
    parallel = ParallelConfig(name=name, recompute=config.parallel.recompute)
    for part in name.split("_"):
        found = {key: match for key, pattern in PARTS.items() if (match := re.fullmatch(pattern, part))}
        for key, match in found.items():
            numbers[key] = int(match[1])
        if part == "sp":
            parallel.sequence_parallel = True
        elif part in {schedule.value for schedule in Schedule}:
            parallel.schedule = Schedule(part)
        elif not found:
            raise ValueError(
                f"benchmark.plans: {part!r} of {name!r} is not known; join tpN, ppN, dpN, zeroN, sp, eager1f1b by _"
            )
    parallel.tp, parallel.pp = numbers["tp"], numbers["pp"]
    split = copy.deepcopy(config)
    split.parallel, split.zero.stage = parallel, numbers["zero"]
    mesh = (numbers["tp"], numbers["pp"], numbers["dp"])
    return composed(split, math.prod(mesh)), mesh
