"""A run as a Slurm batch script."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eagle31.errors import UserError
from train.config.launcher import LauncherConfig

TEMPLATE = "slurm.sh.jinja"


@dataclass(frozen=True)
class Submission:
    """What is to run: the arguments as `train/main.py` takes them, the Python and the checkout."""

    arguments: Sequence[str]
    recipe: str
    output_dir: Path
    python: str
    checkout: Path


def render(submission: Submission, launcher: LauncherConfig) -> str:
    """The batch script.

    Nothing of the environment is written into it: sbatch hands the submitter's on, tokens included.

    Raises:
        UserError: the output directory's path cannot stand in a script for sbatch.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quoted"] = shlex.quote
    first = f"recipe={submission.recipe}"
    return environment.get_template(TEMPLATE).render(
        options=sbatch_options(submission, launcher),
        setup=launcher.setup,
        python=submission.python,
        checkout=str(submission.checkout),
        arguments=[first, *(one for one in submission.arguments if not one.startswith("recipe="))],
        recipe=submission.recipe,
        num_servers=launcher.capture_nodes,
        num_trainers=num_trainers(launcher),
        num_processes=num_processes(launcher),
        capture_port=launcher.capture_port,
        signal_seconds=launcher.signal_seconds,
        max_requeues=launcher.max_requeues,
        artifacts=str(submission.output_dir.absolute() / "artifacts"),
    )


def num_trainers(launcher: LauncherConfig) -> int:
    """The nodes that train."""
    return launcher.nodes - launcher.capture_nodes


def num_processes(launcher: LauncherConfig) -> int:
    """Of each of them."""
    return max(launcher.gpus_per_node, 1)


def check_rows(rows_per_step: int, launcher: LauncherConfig) -> None:
    """Refuses what the run would refuse too, after the queue and the capture.

    Raises:
        UserError: a step's rows do not divide among the processes.
    """
    size = num_trainers(launcher) * num_processes(launcher)
    if rows_per_step % size:
        raise UserError("train.rows_per_step", rows_per_step, f"Must be a multiple of the {size} processes.")


def sbatch_options(submission: Submission, launcher: LauncherConfig) -> list[str]:
    """Raises UserError where sbatch would read the log's path otherwise than it is meant."""
    output_dir = str(submission.output_dir.absolute())
    if not re.fullmatch(r"[\w./+@:,=-]+", output_dir):
        remedy = "Slurm's log goes there: leave blanks, quotes, % and the like out of its path."
        raise UserError("output_dir", output_dir, remedy)
    options = [
        f"--job-name=eagle31-{submission.recipe}",
        f"--output={output_dir}/slurm-%j.out",
        "--open-mode=append",
        f"--nodes={launcher.nodes}",
        "--ntasks-per-node=1",
        "--requeue",
        f"--signal=B:USR1@{launcher.signal_seconds}",
    ]
    if launcher.gpus_per_node:
        options.append(f"--gpus-per-node={launcher.gpus_per_node}")
    if launcher.cpus_per_task is None:
        options.append("--exclusive")
    for name in ("cpus_per_task", "mem", "partition", "account", "qos", "constraint", "time"):
        value = getattr(launcher, name)
        if value is not None:
            options.append(f"--{name.replace('_', '-')}={value}")
    return [*options, *launcher.sbatch]
