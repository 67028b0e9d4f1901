"""How a Slurm job's tasks become ranks: one task a host, where DeepSpeed's launcher starts the ranks, or one a rank.

Which of them is told by what was asked of sbatch (SLURM_*). Several tasks on a host that are not as many as its GPUs
are refused: nobody can tell what was meant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conf import hostfile
from conf.load import ConfigError
from conf.schema import Config
from launch.slurm_names import expand_counts, number, required

AGREE = "in a job they agree; submit it anew, and set none of them yourself"


@dataclass(frozen=True)
class Layout:
    """ranks: of each host. task_per_rank: else one task a host starts all of its ranks."""

    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    task_per_rank: bool

    @property
    def tasks(self) -> int:
        return sum(self.ranks) if self.task_per_rank else len(self.hosts)

    @property
    def slots(self) -> hostfile.Slots:
        return {host: list(range(count)) for host, count in zip(self.hosts, self.ranks, strict=True)}


def layout(environ: Mapping[str, str], hosts: Sequence[str], config: Config) -> Layout:
    """Of the job that `environ` describes. Raises ConfigError."""
    _check_hosts(environ, hosts)
    tasks, gpus = _tasks(environ, hosts), _gpus(environ)
    needed = config.parallel.tp * config.parallel.pp
    task_per_rank = max(tasks) > 1
    if task_per_rank:
        ranks = tasks
        for host, count in zip(hosts, tasks, strict=True):
            if gpus and count != gpus:
                raise ConfigError([
                    f"{host} has {count} tasks and {gpus} GPUs; give --ntasks-per-node={gpus} (a task a rank) or "
                    "--ntasks-per-node=1 (a task a host, which starts a rank a GPU)"
                ])  # fmt: skip
    else:
        ranks = [gpus or needed // math.gcd(needed, len(hosts))] * len(hosts)  # on CPUs: as many as the plan needs
    found = Layout(tuple(hosts), tuple(ranks), task_per_rank)
    problem = hostfile.plan_problem(found.slots, tp=config.parallel.tp, pp=config.parallel.pp)
    if problem is not None:
        raise ConfigError([problem])
    return found


def _tasks(environ: Mapping[str, str], hosts: Sequence[str]) -> list[int]:
    """Of each host. Where nobody asked for a number, SLURM_TASKS_PER_NODE may be that of the CPUs."""
    if "SLURM_NTASKS" not in environ and "SLURM_NTASKS_PER_NODE" not in environ:
        return [1] * len(hosts)
    text = required(environ, "SLURM_TASKS_PER_NODE")
    counts = expand_counts(text)
    if len(counts) != len(hosts):
        raise ConfigError([
            f"SLURM_TASKS_PER_NODE={text} speaks of {len(counts)} hosts, SLURM_JOB_NODELIST of {len(hosts)} "
            f"({', '.join(hosts)}); submit it with sbatch -N HOSTS --ntasks-per-node=TASKS"
        ])  # fmt: skip
    _check_tasks(environ, counts)
    return counts


def _check_hosts(environ: Mapping[str, str], hosts: Sequence[str]) -> None:
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        if name in environ and number(environ, name) != len(hosts):
            raise ConfigError([
                f"{name}={environ[name]} but SLURM_JOB_NODELIST={environ.get('SLURM_JOB_NODELIST')} names {len(hosts)} "
                f"({', '.join(hosts)}); {AGREE}"
            ])  # fmt: skip


def _check_tasks(environ: Mapping[str, str], counts: Sequence[int]) -> None:
    """Slurm's other numbers of tasks. Beside --ntasks, --ntasks-per-node is the most that a host gets."""
    said = f"SLURM_TASKS_PER_NODE={environ['SLURM_TASKS_PER_NODE']}"
    for name in ("SLURM_NTASKS", "SLURM_NPROCS"):
        if name in environ and number(environ, name) != sum(counts):
            raise ConfigError([f"{name}={environ[name]} but {said}, {sum(counts)} in all; {AGREE}"])
    if "SLURM_NTASKS_PER_NODE" in environ:
        most = number(environ, "SLURM_NTASKS_PER_NODE")
        if max(counts) > most or ("SLURM_NTASKS" not in environ and min(counts) < most):
            raise ConfigError([f"SLURM_NTASKS_PER_NODE={most} but {said}; {AGREE}"])


def _gpus(environ: Mapping[str, str]) -> int:
    """Of the first host; 0 where the job has none."""
    match = re.search(r"(\d+)$", environ.get("SLURM_GPUS_ON_NODE", ""))
    return int(match[1]) if match else 0
