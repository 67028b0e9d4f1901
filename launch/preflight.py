"""What launch/preflight.sh does: every host is asked at once, the answers are compared, a table says what is wrong.

Not here: what a host does (check_host.py), what its answers mean (preflight_checks.py, preflight_machine.py,
preflight_rates.py), in which order they are asked (preflight_asking.py), how they print (preflight_table.py).
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from conf import interrupts

    interrupts.while_imports_run()

from conf import hostfile
from conf.load import ConfigError
from launch import allocation
from launch.preflight_asking import VERBS, Preflight, Transport
from launch.preflight_table import as_json, text
from launch.remote import Ssh, ssh_options
from launch.request import Request, check_given, composed, enough_hosts, require_plan
from launch.request import parse as parse_request
from launch.watch import LOST_AFTER_S

MORE = ("quick", "json=", "hosts=")
USAGE = (
    "usage: launch/preflight.sh HOSTFILE|--slurm [-i INCLUDE] [-e EXCLUDE] [-p SSH_PORT] [--interface NAME] "
    "[--hosts N] [--quick] [--json FILE] RECIPE OVERRIDES..."
)
SCRIPT = "check_host.py"
STOPS = (signal.SIGINT, signal.SIGTERM)


def parse(argv: Sequence[str]) -> Request:
    """As launch/multinode.sh does, with MORE options."""
    request = parse_request(argv, usage=USAGE, more=MORE)
    target = request.more.get("json")
    if target is not None and not Path(target).absolute().parent.is_dir():
        raise ConfigError([f"--json {target}: there is no folder {Path(target).absolute().parent}; make it"])
    return request


def choose(request: Request) -> tuple[hostfile.Slots, hostfile.Slots, str]:
    """All hosts, those of them that a run begins on, and the dtype that ranks compute in. ConfigError where the plan
    cannot be, whatever the hosts are.
    """
    config, (hosts, count) = composed(request.recipe, request.overrides), enough_hosts(request)
    first = dict(list(hosts.items())[:count])
    require_plan(request.recipe, config, first)
    return hosts, first, config.precision.dtype.value


def check(request: Request, transport: Transport) -> int:
    hosts, first, dtype = choose(request)
    check_given()
    verbs = [verb for verb in VERBS if verb != "rates" or "quick" not in request.more]
    spares = f" (spares: {', '.join(list(hosts)[len(first) :])})" if len(first) < len(hosts) else ""
    words = shlex.join([str(request.recipe), *request.overrides])
    print(f"{hostfile.ranks(first)} ranks on {', '.join(first)}{spares}, each: {words}")
    print(f"{shlex.join(transport.command('HOST', 'VERB'))} for {', '.join(verbs)}", flush=True)
    if os.environ.get("DRY_RUN", "0") == "1":
        return 0
    rows = Preflight(request, hosts, first, transport, dtype=dtype, rates="rates" in verbs).rows()
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
            return check(request, Ssh(ssh_options(request.ssh_port, lost_after_s=LOST_AFTER_S), SCRIPT))
        with tempfile.TemporaryDirectory() as folder:  # the allocation takes the place of a hostfile
            path = Path(folder) / "allocation"
            argv[argv.index("--slurm")] = str(path)
            request = parse(argv)
            path.write_text(allocation.as_hostfile(composed(request.recipe, request.overrides)))
            return check(request, allocation.Srun(SCRIPT))
    except ConfigError as error:
        print("\n".join(f"launch/preflight.sh: {line}" for line in error.problems), file=sys.stderr)
        return 2


def stop(number: int, frame: object) -> None:
    """Once; what is left on hosts is taken away, so that more of them change nothing."""
    for one in STOPS:
        signal.signal(one, lambda number, frame: None)
    print("launch/preflight.sh: it ends when the hosts have answered what they were asked", file=sys.stderr, flush=True)
    sys.exit(128 + number)


if __name__ == "__main__":
    for one in STOPS:
        signal.signal(one, stop)
    sys.exit(main())
