"""The Python of an environment with TorchSpec, for tests that run its own code."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

_RUN_SECONDS = 300


def torchspec_python() -> str:
    """Skips the test where none is at hand."""
    python = os.environ.get("EAGLE31_TORCHSPEC")
    if not python:
        pytest.skip("TorchSpec is not at hand: EAGLE31_TORCHSPEC=PATH names the Python of its environment")
    return python


def run_there(script: Path, arguments: Sequence[str | Path], **environment: str) -> str:
    """Runs a script of the tests in TorchSpec's environment; returns what it printed."""
    own = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    done = subprocess.run(
        # Without -P the script's neighbours would hide packages of the same name.
        [torchspec_python(), "-P", script, *arguments],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=_RUN_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
