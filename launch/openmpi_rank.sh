#!/usr/bin/env bash
# One rank of launch/multinode.sh --launcher openmpi, started on its host by mpirun:
#
#     openmpi_rank.sh LAUNCH NODE:HOST,NODE:HOST,...      # by rank
#
# Its environment lies in a file of this host, which the last of the host's ranks to read it removes. To mpirun it ends
# well whatever the rank's code is, which it tells in a line: else mpirun would end the others before they have saved, or
# said what they know.
set -euo pipefail

if [[ -z ${LAUNCH_COMMAND:-} ]]; then
    IFS=, read -r -a places <<<"$2"
    place=${places[$OMPI_COMM_WORLD_RANK]}
    file=/dev/shm/launch-$1-${place%%:*}.env
    exec 9<"$file"
    flock 9
    # shellcheck disable=SC1090
    source "$file"
    echo "# read by a rank of $1" >>"$file"
    [[ $(grep -c "^# read by a rank of $1\$" "$file") -lt $OMPI_COMM_WORLD_LOCAL_SIZE ]] || rm -f -- "$file"
    exec 9<&-
    exec "$0" "$1" "${place#*:}" # once more, so that this process's own environment says whose it is
fi

export RANK=$OMPI_COMM_WORLD_RANK LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK
export WORLD_SIZE=$OMPI_COMM_WORLD_SIZE LOCAL_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE
code=0
"$(dirname "$0")/rank.sh" "--local_rank=$LOCAL_RANK" || code=$?
[[ $code -eq 0 ]] || echo "rank $RANK on $2 ended with code $code" >&2
