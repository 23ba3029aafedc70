# The scripts vllm, peers and slurm source this file. It makes environments that are separate from the project's,
# for packages whose requirements differ.

cache=${EAGLE31_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/eagle31}

# find_python WHAT MINOR prints a Python from 3.11 to 3.MINOR.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, $2))" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: $1 needs Python 3.11 to 3.$2; set PYTHON to one." >&2
    return 1
}

# install_packages ENVIRONMENT LEFT_OUT TORCH PACKAGE ... installs PACKAGEs and what they require, without the packages
# in the list LEFT_OUT, and with TORCH whichever build they require.
install_packages() {
    local environment=$1 left_out=$2 torch=$3
    shift 3
    printf '%s\n' $left_out >"$environment/left_out.txt"
    echo "$torch" >"$environment/torch.txt"
    "$environment/bin/python" "$(dirname "${BASH_SOURCE[0]}")/uv.py" pip install --excludes "$environment/left_out.txt" \
        --overrides "$environment/torch.txt" "$torch" "$@"
}

# ensure_separate_environment ENVIRONMENT STAMP MINOR INSTALL CHECK makes an environment with the function INSTALL
# unless its stamp is STAMP. CHECK is Python code that has to run in it. When several processes call this at the
# same time, one makes the environment and the others wait.
ensure_separate_environment() {
    if ! _finished "$1" "$2"; then
        mkdir -p "$(dirname "$1")"
        exec 9>"$1.lock"
        flock 9
        _finished "$1" "$2" || _make "$@"
        exec 9>&-
    fi
}

_finished() {
    [ "$(cat "$1/.eagle31-stamp" 2>/dev/null)" = "$2" ] && [ -x "$1/bin/python" ]
}

_make() {
    local environment=$1 stamp=$2 minor=$3 install=$4 check=$5 log="$1.log" maker status
    maker=$(find_python "$stamp" "$minor")
    _clear "$environment"
    echo "Setting up $stamp in $environment, which takes some minutes; log: $log" >&2
    # set -e has no effect inside a condition, so the status is read afterwards.
    set +e
    (
        set -e
        "$maker" -m venv "$environment"
        "$install" "$environment"
        # Outside the checkout, so that the check imports the installed packages.
        cd /
        "$environment/bin/python" -I -c "$check"
    ) >"$log" 2>&1
    status=$?
    set -e
    if [ "$status" -ne 0 ]; then
        tail -n 20 "$log" >&2
        echo "error: $stamp could not be installed; the full log: $log" >&2
        return 1
    fi
    echo "$stamp" >"$environment/.eagle31-stamp"
    rm -f "$environment.unfinished"
}

# Only an environment that these scripts made is replaced; any other content of the directory is refused.
_clear() {
    if [ -n "$(ls -A "$1" 2>/dev/null)" ] && [ ! -e "$1.unfinished" ] && [ ! -e "$1/.eagle31-stamp" ]; then
        echo "error: $1: The directory has other content; give a new directory." >&2
        return 1
    fi
    touch "$1.unfinished"
    rm -rf "$1"
}
