"""One task of a Slurm job as one rank: python launch/slurm_rank.py [--interface NAME] RECIPE OVERRIDES..., under srun.

Slurm's numbers become the launchers' (RANK, LOCAL_RANK, WORLD_SIZE); launch/slurm.py gave MASTER_ADDR and MASTER_PORT.
The task then becomes the recipe.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conf.load import ConfigError
from launch import environment, on_host
from launch.slurm_names import expand_counts, number, required


def rank_environ(environ: Mapping[str, str], interface: str | None) -> dict[str, str]:
    """What the recipe finds. interface: the network that was named. Raises ConfigError."""
    counts = expand_counts(required(environ, "SLURM_STEP_TASKS_PER_NODE"))
    node, host = number(environ, "SLURM_NODEID"), required(environ, "SLURMD_NODENAME")
    peers = [required(environ, "MASTER_ADDR")] if len(counts) > 1 else []
    seen = on_host.look({"folder": os.getcwd(), "interface": interface, "peers": peers, "port": None})
    if "problem" in seen:
        raise ConfigError([f"host {host}: {seen['problem']}"])
    found = {
        "RANK": str(number(environ, "SLURM_PROCID")),
        "LOCAL_RANK": str(_device(environ, host)),
        "WORLD_SIZE": str(number(environ, "SLURM_STEP_NUM_TASKS")),
        "LOCAL_WORLD_SIZE": str(counts[node]),
    }
    given = {**environment.of_files(environ), **environ}
    if "SLURM_CPUS_PER_TASK" in environ:
        given.setdefault("OMP_NUM_THREADS", environ["SLURM_CPUS_PER_TASK"])  # Slurm has shared the cores out
    return environment.with_network(given, seen["interface"], named=interface is not None) | found


def _device(environ: Mapping[str, str], host: str) -> int:
    """Which of the GPUs that the task sees is its own: Slurm shows it those of its job on the host, or its own alone
    (--gpus-per-task=1). Raises ConfigError.
    """
    shown, local = environ.get("CUDA_VISIBLE_DEVICES", ""), number(environ, "SLURM_LOCALID")
    count = len(shown.split(",")) if shown else 0
    if 1 < count <= local:
        raise ConfigError([
            f"host {host}: its task {local} sees the GPUs {shown} only; leave --gpu-bind out"
        ])  # fmt: skip
    return 0 if count == 1 else local


def main() -> int:
    words, interface = sys.argv[1:], None
    if words[0] == "--interface":
        interface, words = words[1], words[2:]
    try:
        environ = rank_environ(os.environ, interface)
    except ConfigError as error:
        print("\n".join(f"launch/slurm.sbatch: {line}" for line in error.problems), file=sys.stderr)
        return 2
    os.execve(sys.executable, [sys.executable, "-u", *words], environ)


if __name__ == "__main__":
    sys.exit(main())
