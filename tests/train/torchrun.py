"""Starts real runs, with torchrun and in this process."""

import copy
import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tests.chaos.library import preloads
from tests.preloaded.start import PYTHON, interpreter, interpreters
from train.compose import _errors_for_users, compose_config, recipe_name
from train.config.overrides import checked, choices
from train.config.run import RunConfig, check
from train.distributed import World

ROOT = Path(__file__).resolve().parents[2]
RUN_SECONDS = 280
# What torchrun, runs and other commands import.
MODULES = (
    "torch.distributed.run",
    "train.main",
    "train.pipeline",
    "train.reporting.report",
    "train.evaluation.checkpoint",
    "train.launch.slurm",
    "train.parity.inputs",
    "train.parity.speed",
    "data.rendering.inspection",
    "data.capture.hf",
    "data.generation.hf",
    "transformers.models.qwen3.modeling_qwen3",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # which DeepSpeed imports for any optimizer
)


def torchrun_command(script: str, *arguments: str, num_processes: int = 1) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(num_processes), script, *arguments]


def environment() -> dict[str, str]:
    own = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
    # A test that ran W&B in this process leaves the address of its service; runs that share one share ids.
    return {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"} | own


def preloaded_python() -> str:
    """Return an interpreter that has imported what a run needs. See `tests.preloaded.start`.

    `tests.chaos` can stop its programs when they change a file.
    """
    return str(interpreter("ours", PYTHON, MODULES, environment() | preloads(interpreters())))


def torchrun(
    script: str, *arguments: str, num_processes: int = 1, check: bool = True, seconds: float = RUN_SECONDS
) -> str:
    """Run a script to its end, and return its stdout and stderr together.

    torchrun and its ranks are forks of a process that has imported what a run needs.
    """
    python = preloaded_python()
    command = torchrun_command(script, *arguments, num_processes=num_processes)
    done = subprocess.run(
        [python, *command[1:]],
        cwd=ROOT,
        env=environment() | {"PYTHON_EXEC": python},  # torchrun starts the ranks with it
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    assert not check or done.returncode == 0, done.stdout
    return done.stdout


def composed(recipe: str, *arguments: str) -> RunConfig:
    """Compose the configuration as `train/main.py` does, without checking its values."""
    return OmegaConf.to_object(_composed(recipe, arguments))  # type: ignore[return-value]


def checked_config(arguments: Sequence[str]) -> RunConfig:
    """Return what `train.compose.composed` returns, and raise what it raises."""
    recipe = recipe_name(arguments)
    with _errors_for_users(recipe, arguments):
        config = composed(recipe, *(one for one in arguments if not one.startswith("recipe=")))
    check(config)
    return config


@functools.lru_cache(maxsize=256)
def _composed(recipe: str, arguments: tuple[str, ...]) -> DictConfig:
    """Compose the recipe once for each choice of groups, which takes 0.2 s, and set the values in a copy.

    Hydra does the same, in this order.
    """
    groups = tuple(argument for argument in arguments if choices(argument.partition("=")[0]))
    values = checked(argument for argument in arguments if argument not in groups)
    config = copy.deepcopy(_with_groups(recipe, groups))
    try:
        ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(values), config)
    except (HydraException, OmegaConfBaseException):
        return compose_config([f"recipe={recipe}", *arguments])  # which has the error for a user
    return config


@functools.lru_cache(maxsize=256)
def _with_groups(recipe: str, groups: tuple[str, ...]) -> DictConfig:
    return compose_config([f"recipe={recipe}", *groups])


def run_here(recipe: str, *arguments: str) -> None:
    """Run the pipeline in this process, which is faster where no stage needs a process group."""
    from train.pipeline import run_pipeline

    run_pipeline(composed(recipe, *arguments), World(rank=0, local_rank=0, size=1))
