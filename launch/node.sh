#!/usr/bin/env bash
# Run one host's part of a recipe on many, without ssh: for Slurm, cloud schedulers and whatever starts a command a host:
#
#     launch/node.sh HOSTFILE [-i INCLUDE] [-e EXCLUDE] [--node_rank N] [--interface NAME] [--wait SECONDS] RECIPE OVERRIDES...
#
# Started once on every host with the same words, from a folder that all share; it runs `deepspeed --no_ssh` there.
# HOSTFILE, -i, -e: as for launch/multinode.sh, but no ssh needs the names. --node_rank: which line of it this host is,
# from 0; without it, by this host's name or addresses.
#
# MASTER_ADDR, MASTER_PORT: without them the first host's name and 29500; the same on every host. The hosts meet on that
# port first: one that does not come within --wait (300 s), or was told other words, is named on all of them and nothing
# starts. --interface, resume=auto, .deepspeed_env, DRY_RUN=1: as for launch/multinode.sh. Otherwise each host's ranks get
# the environment that this command has there; of the GPUs that CUDA_VISIBLE_DEVICES shows, slot 0 is the first.
#
# Ctrl-C, SIGTERM or SIGUSR1 once, on any host: all ranks finish the step and save, code 75; twice: this host's are ended.
# Exit code, the same everywhere: 0 only if rank 0 came to its end; 2, 75, 76, 130, 143 as launch/multinode.sh; 1 where a
# host did not come or was lost. A host that fails ends the others 30 s later. However it ends, no process is left.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/python.sh
source "$root/launch/python.sh"
run_python node "$@"
