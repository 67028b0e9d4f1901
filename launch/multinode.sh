#!/usr/bin/env bash
# Run a recipe on the hosts of a hostfile, through DeepSpeed's launcher over pdsh and ssh:
#
#     launch/multinode.sh HOSTFILE [-i INCLUDE] [-e EXCLUDE] [-p SSH_PORT] [--interface NAME] [--preflight] [--hosts N]
#         [-r RESTARTS] [--no-replan] [--lost-after SECONDS] [--launcher openmpi] RECIPE OVERRIDES...
#
# HOSTFILE: lines `NAME slots=RANKS`. -i, -e: what of it to use, or to leave out: w0@w1:0,2. -p: where sshd listens.
# The hosts share the folder that you call from and this repository with its .venv, under the same paths; ssh reaches
# them without a password (its options: PDSH_SSH_ARGS_APPEND). --launcher: pdsh (default), or openmpi, whose mpirun then
# starts the ranks.
#
# MASTER_ADDR, MASTER_PORT: without them the first host's address on its route to the others, and a free port there.
# --interface: the network to use on every host; without it that of the route. DRY_RUN=1 prints the command, asks no
# host anything, and stops. Overrides arrive as typed. So does the environment that launch/environment.py lists (WANDB_*,
# HF_*, NCCL_*, ...) and the lines NAME=VALUE of .deepspeed_env here and at home, whatever the values; they are on no
# command line, and in no file that outlives the start.
#
# --preflight: launch/preflight.sh first, and no start where it finds something wrong.
# --hosts: how many of the hosts to use; the others are spares. -r: how often a run that failed is started again from its
# last good checkpoint (0), on the hosts that answer then; where these are fewer, under a plan that fits them, or not at
# all with --no-replan. --lost-after: a host that gives no sign of life for so long is lost, and all are ended (60).
#
# resume=auto unless the overrides say otherwise. Ctrl-C, SIGTERM or SIGUSR1 once: the step is finished, a checkpoint is
# saved, code 75; twice: the ranks are ended at once.
#
# Exit code: 0 only if rank 0 came to its end; 2 for a bad hostfile or configuration, 75 and 76 as launch/local.sh, 130
# and 143 for Ctrl-C and SIGTERM that ended the run at once (after these it is never started again), else that of the
# ranks. However it ends, no process is left on a host that can be reached, and one that cannot ends its own.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/python.sh
source "$root/launch/python.sh"
run_python multinode "$@"
