"""The environments of other trainers of EAGLE drafters, which scripts/setup/peers and torchspec make."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from eagle31.errors import UserError

TORCHSPEC = ("torchspec", "torchspec-lk")  # with its default loss, and with lk_lambda
PEERS = ("speculators", "specforge", *TORCHSPEC)
ROOT = Path(__file__).resolve().parents[3]
SETUP = ROOT / "scripts" / "setup" / "peers"
# Settings of our Python environment, which a peer's must not inherit.
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def find_python(name: str) -> Path:
    """Return the Python of a peer's environment.

    Raises:
        UserError: the peer is not installed.
    """
    if name in TORCHSPEC:
        if importlib.util.find_spec("torchspec") is None:
            raise UserError("--peers", name, "It is not installed; run scripts/setup/torchspec.")
        return Path(sys.executable)
    printed = subprocess.run([str(SETUP), "--print", name], capture_output=True, text=True, check=True)
    python = Path(printed.stdout.strip())
    if not (python.parent.parent / ".eagle31-stamp").exists():
        raise UserError("--peers", name, f"It is not installed; run scripts/setup/peers {name}.")
    return python


def process_environment(threads: int) -> dict[str, str]:
    """Return the environment variables of a process whose time is measured."""
    environment = {name: value for name, value in os.environ.items() if name not in _OURS}
    # Threads that spin while they wait would count as CPU time.
    return environment | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
