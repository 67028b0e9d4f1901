#!/usr/bin/env bash
# One rank of launch/multinode.sh, started on its host by DeepSpeed's launcher. What to run came with the environment,
# as the words of a command line do not survive the remote shell.
set -euo pipefail
: "${LAUNCH_COMMAND:?the environment did not arrive on $(hostname); is the login shell there bash or zsh}"
cd -- "$LAUNCH_FOLDER"
eval "exec $LAUNCH_COMMAND \"\$@\""
