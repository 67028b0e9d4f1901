"""What launch/preflight.sh does: every host is asked at once, the answers are compared, a table says what is wrong.

Not here: what a host does (check_host.py), what its answers mean (preflight_checks.py, preflight_machine.py,
preflight_rates.py), in which order they are asked (preflight_asking.py), how they print (preflight_table.py).
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conf import hostfile
from conf.cli import compose_config, parse_flags
from conf.load import ConfigError, range_problems
from launch import allocation, multinode
from launch.preflight_asking import VERBS, Preflight, Transport
from launch.preflight_table import as_json, text
from launch.remote import PATIENCE, Ssh
from parallel import rules

MORE = ("quick", "json=")
USAGE = (
    "usage: launch/preflight.sh HOSTFILE|--slurm [-i INCLUDE] [-e EXCLUDE] [-p SSH_PORT] [--interface NAME] [--quick] "
    "[--json FILE] RECIPE OVERRIDES..."
)
SCRIPT = "check_host.py"


def parse(argv: Sequence[str]) -> multinode.Request:
    """As launch/multinode.sh does, with MORE options."""
    request = multinode.parse(argv, more=MORE, usage=USAGE)
    target = request.more.get("json")
    if target is not None and not Path(target).absolute().parent.is_dir():
        raise ConfigError([f"--json {target}: there is no folder {Path(target).absolute().parent}; make it"])
    return request


def choose(request: multinode.Request) -> tuple[hostfile.Slots, str]:
    """The hosts, and the dtype that ranks compute in. ConfigError where the plan cannot be, whatever the hosts are."""
    hosts = hostfile.chosen(hostfile.read(request.hostfile), include=request.include, exclude=request.exclude)
    flags = parse_flags(request.overrides)
    config = compose_config(flags.overrides, config_dir=flags.config_dir)
    problems = range_problems(config)
    if not problems:
        problem = hostfile.plan_problem(hosts, tp=config.parallel.tp, pp=config.parallel.pp)
        problems = rules.problems(config, world_size=ranks(hosts), device=None) if problem is None else [problem]
    if problems:
        raise ConfigError(problems)
    return hosts, config.precision.dtype.value


def ranks(hosts: hostfile.Slots) -> int:
    return sum(map(len, hosts.values()))


def ssh(request: multinode.Request) -> Ssh:
    """With the options that launch/multinode.sh takes."""
    port = f"-p {request.ssh_port}" if request.ssh_port else ""
    given = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
    return Ssh(" ".join(option for option in (given, port, PATIENCE) if option), SCRIPT)


def check(request: multinode.Request, transport: Transport) -> int:
    hosts, dtype = choose(request)
    multinode.check_given()
    verbs = [verb for verb in VERBS if verb != "rates" or "quick" not in request.more]
    print(f"{ranks(hosts)} ranks on {', '.join(hosts)}, each: {shlex.join([str(request.recipe), *request.overrides])}")
    print(f"{shlex.join(transport.command('HOST', 'VERB'))} for {', '.join(verbs)}", flush=True)
    if os.environ.get("DRY_RUN", "0") == "1":
        return 0
    rows = Preflight(request, hosts, transport, dtype=dtype, rates="rates" in verbs).rows()
    print(f"\n{text(rows, colours=sys.stdout.isatty())}", flush=True)
    target = request.more.get("json")
    if target is not None:
        Path(target).write_text(json.dumps(as_json(rows), indent=2) + "\n")
    return 1 if any(row.red for row in rows) else 0


def main() -> int:
    argv = sys.argv[1:]
    try:
        if "--slurm" not in argv:
            request = parse(argv)
            return check(request, ssh(request))
        with tempfile.TemporaryDirectory() as folder:  # the allocation takes the place of a hostfile
            path = Path(folder) / "allocation"
            path.write_text(allocation.as_hostfile())
            argv[argv.index("--slurm")] = str(path)
            return check(parse(argv), allocation.Srun(SCRIPT))
    except ConfigError as error:
        print("\n".join(f"launch/preflight.sh: {line}" for line in error.problems), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
