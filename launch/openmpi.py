"""OpenMPI's mpirun in DeepSpeed's launcher's place, for launch/multinode.sh --launcher openmpi: it starts every rank.

mpirun is called directly: DeepSpeed's OpenMPIRunner takes no filters, names eth0, and puts the environment's values on
the command line. The ranks are no MPI programs; openmpi_rank.sh turns what mpirun says into RANK, LOCAL_RANK and
WORLD_SIZE. Not here: what travels (environment.py), and watching the run (watch.py).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from conf.hostfile import Slots
from conf.load import ConfigError

# A rank that ended is told by openmpi_rank.sh; mpirun puts the name of its stream before the line.
FAILED = re.compile(r"(?:\[1,\d+\]<stderr>:)?rank \d+ on (\S+) ended with code (\d+)")
# mpirun's own ranks get its environment as it is, those of other hosts none of it: the same for both.
OF_A_LOGIN = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TMPDIR", "SSH_AUTH_SOCK")
RANK = Path(__file__).resolve().with_name("openmpi_rank.sh")


def require() -> None:
    if shutil.which("mpirun") is None:
        raise ConfigError(["mpirun is not installed here; install it (apt install openmpi-bin), on every host"])


def command_of(hosts: Slots, *, launch: str, ssh_options: str, interface: str | None) -> list[str]:
    """One process for every slot, in the hostfile's order."""
    ranks = [(number, name) for number, (name, slots) in enumerate(hosts.items()) for _ in slots]
    settings = {
        "plm_rsh_agent": f"ssh {ssh_options}",
        "orte_launch_agent": f"env LAUNCH_ID={launch} LAUNCH_NODE=all orted",  # so that it is found at the end
        "plm_rsh_no_tree_spawn": "1",  # all from here: a host need not reach another by ssh
    }
    if interface is not None:
        settings["oob_tcp_if_include"] = interface
    command = ["mpirun", "--map-by", "seq", "--host", ",".join(name for _, name in ranks), "-n", str(len(ranks))]
    command += ["--bind-to", "none", "--tag-output", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    command += [word for name, value in settings.items() for word in ("--mca", name, value)]
    return [*command, str(RANK), launch, ",".join(f"{number}:{name}" for number, name in ranks)]


def variables(given: Sequence[Mapping[str, str]], hosts: Slots, *, master: str, port: str) -> list[dict[str, str]]:
    """Of each host's ranks: with what DeepSpeed's launcher would set there."""
    return [
        {**one, "MASTER_ADDR": master, "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": ",".join(map(str, slots))}
        for one, slots in zip(given, hosts.values(), strict=True)
    ]


def environ(given: Mapping[str, str]) -> dict[str, str]:
    """mpirun's own."""
    return {name: value for name, value in given.items() if name in OF_A_LOGIN or name.startswith("OMPI_MCA_")}
