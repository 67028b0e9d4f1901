"""What launch/preflight.sh does: every host is asked at once, the answers are compared, a table says what is wrong.

Not here: what a host does (check_host.py), what its answers mean (preflight_checks.py, preflight_machine.py,
preflight_rates.py), in which order they are asked (preflight_asking.py), how they print (preflight_table.py).
"""

from __future__ import annotations

import getopt
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conf.cli import compose_config, parse_flags
from conf.load import ConfigError
from launch import allocation, multinode
from launch.preflight_asking import VERBS, Preflight, Transport
from launch.preflight_table import as_json, text
from launch.remote import Ssh
from parallel import rules

MORE = ("quick", "json=", "slurm")
USAGE = (
    "usage: launch/preflight.sh HOSTFILE|--slurm [-i INCLUDE] [-e EXCLUDE] [-p SSH_PORT] [--interface NAME] [--quick] "
    "[--json FILE] RECIPE OVERRIDES..."
)
SCRIPT = "check_host.py"


def parse(argv: Sequence[str], folder: Path) -> multinode.Request:
    """As launch/multinode.sh's; under --slurm the allocation takes the place of the hostfile, in `folder`."""
    try:
        options, rest = getopt.getopt(argv, "i:e:p:", ["include=", "exclude=", "ssh_port=", "interface=", *MORE])
    except getopt.GetoptError as error:
        raise ConfigError([f"{error}; {USAGE}"]) from None
    if "--slurm" in dict(options):
        (folder / "allocation").write_text(allocation.as_hostfile())
        argv = [*argv[: len(argv) - len(rest)], str(folder / "allocation"), *rest]
    request = multinode.parse(argv, more=MORE, usage=USAGE)
    if "slurm" in request.more and "--slurm" not in dict(options):
        raise ConfigError([f"--slurm stands in place of a hostfile; {USAGE}"])
    target = request.more.get("json")
    if target is not None and not Path(target).absolute().parent.is_dir():
        raise ConfigError([f"--json {target}: there is no folder {Path(target).absolute().parent}; make it"])
    return request


def check_plan(request: multinode.Request, world_size: int) -> str:
    """The dtype that ranks compute in. ConfigError where the plan cannot be, whatever the hosts are."""
    flags = parse_flags(request.overrides)
    config = compose_config(flags.overrides, config_dir=flags.config_dir)
    problems = rules.problems(config, world_size=world_size, device=None)
    if problems:
        raise ConfigError(problems)
    return config.precision.dtype.value


def check(request: multinode.Request) -> int:
    hosts = multinode.choose_hosts(request)
    multinode.check_given()
    world_size = sum(map(len, hosts.values()))
    dtype = check_plan(request, world_size)
    transport: Transport = Ssh(multinode.ssh_options(request), SCRIPT)
    if "slurm" in request.more:
        transport = allocation.Srun(SCRIPT)
    verbs = [verb for verb in VERBS if verb != "rates" or "quick" not in request.more]
    print(f"{world_size} ranks on {', '.join(hosts)}, each: {shlex.join([str(request.recipe), *request.overrides])}")
    print(f"{shlex.join(transport.command('HOST', 'VERB'))} for {', '.join(verbs)}", flush=True)
    if os.environ.get("DRY_RUN", "0") == "1":
        return 0
    rows = Preflight(request, hosts, transport, dtype=dtype, rates="quick" not in request.more).rows()
    print(f"\n{text(rows, colours=sys.stdout.isatty())}", flush=True)
    target = request.more.get("json")
    if target is not None:
        Path(target).write_text(json.dumps(as_json(rows), indent=2) + "\n")
    return 1 if any(row.red for row in rows) else 0


def main() -> int:
    try:
        with tempfile.TemporaryDirectory() as folder:
            return check(parse(sys.argv[1:], Path(folder)))
    except ConfigError as error:
        print("\n".join(f"launch/preflight.sh: {line}" for line in error.problems), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
