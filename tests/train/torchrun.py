"""Starts runs: in ranks as torchrun starts them, and in this process."""

import sys

from omegaconf import OmegaConf

from tests.runs.forked import RUN_SECONDS, run
from train.config.compose import compose_config
from train.config.run import RunConfig
from train.distributed import World


def torchrun_command(script: str, *arguments: str, num_processes: int = 1) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(num_processes), script, *arguments]


def torchrun(
    script: str, *arguments: str, num_processes: int = 1, check: bool = True, seconds: float = RUN_SECONDS
) -> str:
    """Run a script to its end in ranks as torchrun starts them, and return all that they print."""
    status = 0 if check else None
    return run(script, *arguments, num_processes=num_processes, status=status, seconds=seconds)


def composed(recipe: str, *arguments: str) -> RunConfig:
    """Compose the configuration as `train/main.py` does, without checking its values."""
    return OmegaConf.to_object(compose_config([f"recipe={recipe}", *arguments]))  # type: ignore[return-value]


def run_here(recipe: str, *arguments: str) -> None:
    """Run the pipeline in this process, which is faster where no stage needs a process group."""
    from train.pipeline import run_pipeline

    run_pipeline(composed(recipe, *arguments), World(rank=0, local_rank=0, size=1))
