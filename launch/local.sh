#!/usr/bin/env bash
# Run a recipe on the ranks of this machine, through DeepSpeed's launcher:
#
#     launch/local.sh [-n RANKS] [-r RESTARTS] recipes/pretrain.py OVERRIDES...
#
# RANKS: without it as many as the configured plan needs (CPU), or as fit on the GPUs. RESTARTS: how often a run that
# failed is started again from its last good checkpoint (0). DRY_RUN=1 prints the command and stops. MASTER_PORT: without
# it a free one. DS_ACCELERATOR=cpu keeps off the GPUs; OMP_NUM_THREADS: threads of a rank.
#
# resume=auto unless the overrides say otherwise. Ctrl-C, SIGTERM or SIGUSR1 once: the step is finished, a checkpoint is
# saved, code 75; twice: the ranks are ended at once.
#
# Exit code: 0 only if rank 0 came to its end (DeepSpeed's launcher also returns 0 when its per-node process was killed);
# 2 for a bad configuration, 75 for a stop on request, 76 for one by an alert (never started again), 130 and 143 for
# Ctrl-C and SIGTERM that ended the run at once.
# However it ends, no rank is left behind.
set -euo pipefail

die() {
    echo "launch/local.sh: $1" >&2
    exit 2
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage="usage: launch/local.sh [-n RANKS] [-r RESTARTS] RECIPE OVERRIDES..."
ranks=""
restarts=0
while getopts "n:r:h" option; do
    case $option in
        n) ranks=$OPTARG ;;
        r) restarts=$OPTARG ;;
        h) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" && exit 0 ;;
        *) die "$usage" ;;
    esac
done
shift $((OPTIND - 1))
[[ $# -ge 1 ]] || die "$usage"
[[ -z $ranks || $ranks =~ ^[1-9][0-9]{0,3}$ ]] || die "-n $ranks is not a number of ranks; give 1 to 9999"
[[ -z ${MASTER_PORT:-} || ($MASTER_PORT =~ ^[1-9][0-9]{0,4}$ && $MASTER_PORT -lt 65536) ]] ||
    die "MASTER_PORT=$MASTER_PORT is not a port; give 1 to 65535, or unset it"
for name in SLURM_STEP_NUM_TASKS OMPI_COMM_WORLD_SIZE; do
    [[ ${!name:-1} == 1 ]] ||
        die "srun or mpirun started it ${!name} times ($name), each a run of its own; start one, or submit launch/slurm.sbatch"
done
[[ $restarts =~ ^[0-9]+$ ]] || die "-r $restarts is not a number of restarts; give 0 or more"

recipe=$1
shift
[[ -f $recipe ]] || recipe=$root/$recipe
[[ -f $recipe ]] || die "there is no recipe ${recipe#"$root"/}; see recipes/"

# shellcheck source=launch/python.sh
source "$root/launch/python.sh"
find_bin launch/local.sh

ask() { # a module of this repository, by name. Ctrl-C is answered by this script alone, when it has ended
    (
        trap '' INT
        PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$bin/python" "$@"
    )
}
trap 'echo "launch/local.sh: interrupted" >&2; exit 130' INT

added=()
resume=""
for argument in "$@"; do
    [[ $argument != resume=* ]] || resume=$argument
done
[[ -n $resume ]] || set -- "$@" resume=auto
line=$(ask -m conf.ranks "$(basename "$recipe")" "$ranks" "$@") # a bad configuration ends here, with code 2
read -r -a answer <<<"$line"
ranks=${answer[0]}
added=("${answer[@]:1}")

device=$(ask -c 'from parallel.hardware import device_kind; print(device_kind())')
if [[ $device == cpu ]]; then
    export DS_ACCELERATOR=cpu
    cores=$(ask -c 'import os; print(len(os.sched_getaffinity(0)))')
    threads=$((cores / ranks > 0 ? cores / ranks : 1))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}
fi

# --num_gpus would take the first GPUs whatever CUDA_VISIBLE_DEVICES says: name the visible ones.
where=(--num_gpus "$ranks")
if [[ $device == cuda && -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
    visible=$(cut -d, -f"1-$ranks" <<<"$CUDA_VISIBLE_DEVICES")
    [[ $(tr ',' '\n' <<<"$visible" | wc -l) -eq $ranks ]] ||
        die "$ranks ranks but CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES; lower -n or show more GPUs"
    where=(--include "localhost:$visible")
fi

free_port() {
    ask - "${MASTER_PORT:-0}" <<'PY'
import socket, sys
try:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an ended run's port is free
        probe.bind(("127.0.0.1", int(sys.argv[1])))
        print(probe.getsockname()[1])
except OSError as error:
    print(f"launch/local.sh: MASTER_PORT={sys.argv[1]} cannot be used: {error.strerror}; unset it or choose another",
          file=sys.stderr)
    sys.exit(2)
PY
}

end_ranks() { # ask the group to end with signal $1, insist after ten seconds
    kill "-$1" -- "-$group" 2>/dev/null || return 0
    for _ in {1..100}; do
        kill -0 -- "-$group" 2>/dev/null || return 0
        sleep 0.1
    done
    kill -KILL -- "-$group" 2>/dev/null || true
}

# shellcheck disable=SC2329 # called by on_signal
ask_ranks() { # let the ranks finish their step and save; DeepSpeed's launcher would end them instead. 1: there is none yet
    ask - "$group" <<'PY'
import os, psutil, signal, sys
asked = 0
for process in psutil.process_iter(["cmdline"]):
    try:
        if os.getpgid(process.pid) == int(sys.argv[1]) and any(
            word.startswith("--local_rank=") for word in process.info["cmdline"] or ()
        ):
            process.send_signal(signal.SIGUSR1)
            asked += 1
    except (ProcessLookupError, psutil.NoSuchProcess):
        pass
sys.exit(not asked)
PY
}

asked=""
group=""
# shellcheck disable=SC2329 # called by trap
on_signal() { # $1: the signal, $2: the exit code when it comes a second time
    if [[ -z $asked ]]; then
        asked=$1
        stop_code=$2
        [[ -z $group ]] || ! ask_ranks || return 0
        echo "launch/local.sh: ended while no rank runs" >&2
        set -- TERM "$2" # which DeepSpeed's launcher takes without a word
    fi
    trap '' INT TERM USR1
    if [[ -n $group ]]; then
        ask_ranks || true # the second time means: at once
        end_ranks "$1"
    fi
    rm -f "$marker"
    exit "$2"
}

listen() {
    trap 'on_signal INT 130' INT
    trap 'on_signal TERM 143' TERM
    trap 'on_signal TERM 143' USR1
}

marker=$(mktemp)
LAUNCH_ID=$(basename "$marker")
export LAUNCH_MARKER=$marker LAUNCH_ID # by which its run is found again
attempt=0
listen
while true; do
    port=$(free_port)
    command=("$bin/deepspeed" --quiet "${where[@]}" --master_addr 127.0.0.1 --master_port "$port" "$recipe" "$@" "${added[@]}")
    printf '%q ' "${command[@]}"
    echo
    rm -f "$marker"
    [[ ${DRY_RUN:-0} != 1 ]] || exit 0

    # Job control gives the launcher and all its ranks one process group of their own, so that they end together.
    set -m
    "${command[@]}" </dev/null &
    group=$!
    set +m
    code=0
    wait "$group" || code=$?
    while kill -0 "$group" 2>/dev/null; do # a signal interrupts wait
        code=0
        wait "$group" || code=$?
    done
    trap '' INT TERM USR1
    end_ranks TERM # ranks whose launcher was killed
    group=""
    listen
    if [[ $code -eq 0 && ! -e $marker ]]; then
        echo "launch/local.sh: the launcher ended but rank 0 did not finish: some process was killed" >&2
        code=1
    fi
    if [[ -n $asked ]]; then
        [[ $code -ne 246 ]] || code=$stop_code # ranks that did not train yet knew no SIGUSR1
        break
    fi
    case $code in 0 | 2 | 75 | 76 | 130 | 143) break ;; esac
    [[ $attempt -lt $restarts ]] || break
    attempt=$((attempt + 1))
    echo "launch/local.sh: exit code $code; restart $attempt of $restarts" >&2
    run_id=$(ask -m launch.restarts "$LAUNCH_ID" "$@")
    [[ -z $run_id ]] || set -- "$@" resume=auto "run.id=$run_id"
    LAUNCH_RESTART=$(printf '{"number": %d, "of": %d, "code": %d, "reason": "exit code %d"}' \
        "$attempt" "$restarts" "$code" "$code")
    export LAUNCH_RESTART # for its timeline
done
rm -f "$marker"
exit "$code"
