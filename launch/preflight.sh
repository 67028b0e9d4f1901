#!/usr/bin/env bash
# Check every host of a run before it starts, all at once; launch/multinode.sh --preflight does so and then starts:
#
#     launch/preflight.sh HOSTFILE [-i INCLUDE] [-e EXCLUDE] [-p SSH_PORT] [--interface NAME] [--hosts N] RECIPE OVERRIDES...
#     launch/preflight.sh --slurm RECIPE OVERRIDES...         inside an allocation: its hosts, through srun
#
# HOSTFILE, -i, -e, -p, --interface, --hosts, MASTER_ADDR, MASTER_PORT and the environment mean what they do for
# launch/multinode.sh. Also: --quick leaves out the rates, which take most of the time; --json FILE writes what was found
# for machines. DRY_RUN=1 prints what would be asked, asks no host anything, and stops.
#
# A row a check, a cell a host (those that say the same are joined), and below what to do about each red one:
# docs/preflight.md. Exit code: 0 when nothing is wrong, 1 where a cell is red, 2 for a bad hostfile or configuration.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/python.sh
source "$root/launch/python.sh"
run_python preflight "$@"
