"""Measure a cluster's links and rates over the plan's axes, and write them as a cluster to plan with.

    launch/local.sh -n 2 recipes/probe.py probe.write=NAME                    then: recipes/plan.py cluster=NAME ...
    deepspeed --hostfile hosts recipes/probe.py model=llama_8b precision=bf16 parallel.tp=8 probe.write=NAME
    python recipes/probe.py                                                   one rank: rates, no links

Prints every measured time beside what the fitted numbers make of it.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from conf import interrupts

    interrupts.while_imports_run()

from conf.cli import main
from conf.schema import Config
from parallel.plan import ParallelPlan


def run(config: Config, plan: ParallelPlan) -> int:
    """Config and plan are valid here; torch is imported from here on."""
    from engine.device import this_device
    from engine.distributed import start, stop
    from engine.failure import refuse
    from engine.probe import measure
    from engine.probe_file import as_yaml, target
    from engine.session import announce

    try:
        path = target(config.probe)
    except (ValueError, OSError) as error:
        return refuse(error)
    device = this_device()
    start(device, timeout_s=config.cluster.timeout_s)
    try:
        found = measure(config, plan, device=device, progress=announce)
    except ValueError as error:
        return refuse(error)
    announce(found.text())
    if path is not None and found.rank == 0:
        path.write_text(as_yaml(found, name=path.stem))
        announce(f"\n{path}")
    stop()
    return 0


if __name__ == "__main__":
    main(run)
