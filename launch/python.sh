# shellcheck shell=bash
# What the launchers' scripts share. Sourced where `root` is set to this repository.
: "${root:?}"

find_bin() { # $1: who asks. Sets bin: .venv's, else the one on the PATH that has deepspeed
    local found
    if [[ -x $root/.venv/bin/deepspeed ]]; then
        bin=$root/.venv/bin
    elif found=$(command -v deepspeed); then
        bin=$(dirname "$found")
    else
        echo "$1: deepspeed is neither in .venv nor on the PATH; run make train or make test once" >&2
        exit 2
    fi
}

run_python() { # $1: the script's name without its ending; then its words. Becomes launch/NAME.py, or prints the head as help
    local name=$1
    shift
    if [[ $# -eq 0 || $1 == -h || $1 == --help ]]; then
        sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$root/launch/$name.sh"
        exit $(($# == 0 ? 2 : 0))
    fi
    find_bin "launch/$name.sh"
    exec "$bin/python" "$root/launch/$name.py" "$@"
}
