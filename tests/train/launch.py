"""Starting real runs under torchrun."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def torchrun_command(script: str, *arguments: str, num_processes: int = 1) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(num_processes), script, *arguments]


def environment() -> dict[str, str]:
    own = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **own}


def torchrun(script: str, *arguments: str, num_processes: int = 1, check: bool = True) -> str:
    """Returns stdout and stderr together."""
    command = torchrun_command(script, *arguments, num_processes=num_processes)
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert not check or done.returncode == 0, done.stdout
    return done.stdout
