# Other scripts source this file. `ensure_environment EXTRA` makes .venv with the versions in scripts/setup/locked that
# the extra of pyproject.toml (train or dev) needs, each compared with its hash, and puts .venv first on PATH. The
# project itself is installed editable. With EAGLE31_NO_VENV set it uses the active environment.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"

ensure_environment() {
    if [ -n "${EAGLE31_NO_VENV:-}" ]; then
        return
    fi
    local venv="$root/.venv" extra=$1 build=cuda stamp installed
    command -v nvidia-smi >/dev/null 2>&1 || build=cpu
    stamp=$(cat pyproject.toml scripts/setup/locked/*.txt <(echo "$build") | sha256sum | cut -d ' ' -f 1)
    installed=$(cat "$venv/.eagle31-stamp" 2>/dev/null || true)
    # dev holds all that train does.
    if [ "$installed" != "$extra $stamp" ] && [ "$installed" != "dev $stamp" ]; then
        local python=${PYTHON:-python3}
        if ! "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))'; then
            echo "error: PYTHON=$python: Python 3.10 to 3.14 is needed; set PYTHON to one." >&2
            exit 1
        fi
        echo "Setting up $venv ..." >&2
        [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
        "$venv/bin/python" scripts/setup/install_locked "$extra" "$build"
        echo "$extra $stamp" >"$venv/.eagle31-stamp"
    fi
    export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv"
}

if ! command -v nvidia-smi >/dev/null 2>&1; then
    export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu} # DeepSpeed warns when it has to find out
fi
