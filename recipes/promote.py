"""Climb the ladder that promotes a profile, and write what was observed into its record.

    python recipes/promote.py profile=tp2_pp2 model=llama_tiny promote.tolerance=0.2
    python recipes/promote.py profile=tp2_pp2 promote.dry_run=true                    the rungs and their commands
    python recipes/promote.py profile=tp2_pp2 promote.run=runs/default/ID             fill in a run that has finished
    python recipes/promote.py profile=tp2_pp2 promote.run=runs/benchmark/ID.json      or a benchmark that has
    python recipes/promote.py profile=tp8_pp8 model=llama_70b cluster=dgx_h100 promote.layers=8    of a model that one
                                         device does not hold: its first 8 blocks on each rung, then the whole model

Started as one process; each rung starts its own ranks on this machine. Model, batch and cluster are those of
the command line, with promote.run those of what is filled in: a promotion holds for them, for these software versions,
and for nothing else. 0: promoted; 1: not.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from conf import interrupts

    interrupts.while_imports_run()

from conf.cli import main, parse_flags
from conf.schema import Config
from parallel.plan import ParallelPlan


def ranks_of(config: Config) -> int:
    """Of the whole plan."""
    cluster, parallel = config.cluster, config.parallel
    found = cluster.nodes * cluster.devices_per_node if cluster.devices_per_node else parallel.tp * parallel.pp
    return config.promote.ranks or found


def run(config: Config, plan: ParallelPlan) -> int:
    from engine.failure import refuse
    from engine.promote import Promotion

    flags = parse_flags(sys.argv[1:])
    try:
        promotion = Promotion.open(config, plan, flags.overrides, config_dir=flags.config_dir)
        if config.promote.dry_run:
            print(promotion.commands())
            return 0
        observation = promotion.filled_in() if config.promote.run else promotion.climbed()
    except ValueError as error:
        return refuse(error)
    print(promotion.verdict(observation))
    return 0 if observation["promoted"] else 1


if __name__ == "__main__":
    sys.argv[1:] = [f"parallel={word.removeprefix('profile=')}" if word.startswith("profile=") else word
                    for word in sys.argv[1:]]  # fmt: skip
    main(run, ranks=ranks_of)
