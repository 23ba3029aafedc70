"""vLLM's own environment: where its Python is, and what a process of it is started with."""

import os
import subprocess
from pathlib import Path

from data.transport.mooncake import REQUIREMENT
from eagle31.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SETUP = ROOT / "scripts" / "setup" / "vllm"
# Python's own settings, and a launcher's, belong to our processes and not to vLLM's.
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "VLLM_ENABLE_V1_MULTIPROCESSING")
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def find_python() -> Path:
    """Python of vLLM's environment: EAGLE31_VLLM_PYTHON, else what `scripts/setup/vllm` made.

    Raises:
        UserError: there is none.
    """
    remedy = (
        "vLLM's environment is not there; run scripts/setup/vllm, or name the Python of your own with "
        "EAGLE31_VLLM_PYTHON."
    )
    own = os.environ.get("EAGLE31_VLLM_PYTHON")
    if own:
        if not os.access(own, os.X_OK):
            raise UserError("EAGLE31_VLLM_PYTHON", own, remedy)
        return Path(own)
    printed = subprocess.run([str(SETUP), "--print"], capture_output=True, text=True, check=True)
    path = Path(printed.stdout.strip())
    if not (path.parent.parent / ".eagle31-stamp").exists():
        raise UserError("EAGLE31_VLLM_ENV", path.parent.parent, remedy)
    return path


def check_mooncake(python: Path) -> None:
    """Raises UserError where an engine could not put into a Mooncake store."""
    probe = "import importlib.util as u, sys; sys.exit(u.find_spec('mooncake') is None)"
    if subprocess.run([str(python), "-I", "-c", probe]).returncode:
        remedy = f"vLLM's environment lacks its Python package: {python} -m pip install '{REQUIREMENT}'."
        raise UserError("capture.transport", "mooncake", remedy)


def environment(python: Path) -> dict[str, str]:
    """Of a process that runs vLLM."""
    own = {name: value for name, value in os.environ.items() if name not in (*_OURS, *_LAUNCHER)}
    own.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; read on the CPU only
    own.setdefault("VLLM_NO_USAGE_STATS", "1")
    # vLLM on the CPU asks for Intel's OpenMP, which lies in its environment; drafting is slow without.
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    if openmp.exists():
        own.setdefault("LD_PRELOAD", str(openmp))
    return own


def capture_environment(python: Path) -> dict[str, str]:
    """The same for one that finds the connector."""
    # A prompt may fill all the positions that the target has: the token behind it is never computed.
    return environment(python) | {"PYTHONPATH": str(ROOT), "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
