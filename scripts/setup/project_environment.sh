# Other scripts source this file. `ensure_environment EXTRA` makes .venv, installs the project editable with that
# extra of pyproject.toml (train or dev) if the file has changed, and puts .venv first on PATH. With
# EAGLE31_NO_VENV set it uses the active environment.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"

ensure_environment() {
    if [ -n "${EAGLE31_NO_VENV:-}" ]; then
        return
    fi
    local venv="$root/.venv" extra=$1 constraint=() stamp installed
    if ! command -v nvidia-smi >/dev/null 2>&1; then
        constraint=(--constraint constraints-cpu.txt)
    fi
    stamp=$(cat pyproject.toml constraints-cpu.txt <(echo "${constraint[@]}") | sha256sum | cut -d ' ' -f 1)
    installed=$(cat "$venv/.eagle31-stamp" 2>/dev/null || true)
    # dev holds all that train does.
    if [ "$installed" != "$extra $stamp" ] && [ "$installed" != "dev $stamp" ]; then
        local python=${PYTHON:-python3}
        if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
            echo "error: PYTHON=$python: Python 3.10 or newer is needed; set PYTHON to one." >&2
            exit 1
        fi
        echo "Setting up $venv ..." >&2
        [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
        # Nothing is compiled at once: Python compiles what is imported, at the first import.
        local install=("$venv/bin/python" -m pip install --quiet --no-compile "${constraint[@]}")
        # torch first and alone: with its build settled, nothing that follows brings another.
        "${install[@]}" torch
        "${install[@]}" --editable ".[$extra]"
        echo "$extra $stamp" >"$venv/.eagle31-stamp"
    fi
    export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv"
}

if ! command -v nvidia-smi >/dev/null 2>&1; then
    export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu} # DeepSpeed warns when it has to find out
fi

# Threads that spin while they wait cost more than they bring where cores are shared.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
