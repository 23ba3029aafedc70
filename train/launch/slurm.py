"""Slurm batch scripts for runs."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.batches.loader import check_divisible
from eagle31.errors import UserError
from train.config.compose import CHECKOUT
from train.config.run import RunConfig, Stage, uses_servers
from train.stop import STOPPED, STOPPED_FILE
from train.templates import template

TEMPLATE = Path(__file__).with_name("slurm.sh.jinja")
_CONTAINER_PYTHON = "python3"


@dataclass(frozen=True)
class Job:
    """The nodes of a run.

    Args:
        target_nodes: how many of the nodes, the last ones, run vLLM servers; the others train.
        servers_per_node: servers of a target node, which share its GPUs evenly.
        gpus_per_node: GPUs of a node, with a process each. 0: one process per node, on its CPU.
        save_seconds: seconds before the time limit at which the run saves and the job is queued again.
        max_requeues: number of requeues after which the job fails; Slurm counts preemptions too.
        unreachable_seconds: after which a job fails whose servers are ready and do not answer.
        container_image: in which Slurm's plugin Pyxis starts the processes.
        apptainer_image: in which Apptainer does.
        mounts: paths that the container has, in addition to the checkout and the output directory.
        setup: shell lines that run first, such as "module load cuda".
        sbatch: further options of sbatch, such as --partition=NAME.
    """

    nodes: int = 1
    target_nodes: int = 0
    servers_per_node: int = 1
    gpus_per_node: int = 8
    save_seconds: int = 300
    max_requeues: int = 20
    unreachable_seconds: int = 300
    container_image: str | None = None
    apptainer_image: str | None = None
    mounts: Sequence[str] = ()
    setup: Sequence[str] = ()
    sbatch: Sequence[str] = ()

    @property
    def num_trainers(self) -> int:
        return self.nodes - self.target_nodes

    @property
    def num_processes(self) -> int:
        """The number of processes on each node that trains."""
        return max(self.gpus_per_node, 1)


def render(
    job: Job,
    recipe: str,
    arguments: Sequence[str],
    output_dir: Path,
    python: str,
) -> str:
    """Return the batch script.

    It contains no environment variables, because sbatch passes on the submitter's, tokens included.

    Args:
        arguments: those of `train/main.py`.
        python: the Python that runs it; in a container its own `python3` does.

    Raises:
        UserError: sbatch would misread the output directory's path.
    """
    mounts = [str(CHECKOUT), str(output_dir.absolute()), *job.mounts]
    inside, srun_options = [python], ""
    if job.container_image is not None:
        mounted = ",".join(f"{path}:{path}" for path in mounts)
        inside = [_CONTAINER_PYTHON]
        srun_options = (
            f"{shlex.join([f'--container-image={job.container_image}', f'--container-mounts={mounted}'])} "
        )
    elif job.apptainer_image is not None:
        bound = [word for path in mounts for word in ("--bind", path)]
        inside = ["apptainer", "exec", "--nv", *bound, job.apptainer_image, _CONTAINER_PYTHON]
    return template(TEMPLATE).render(
        job=job,
        options=_sbatch_options(job, recipe, output_dir),
        python=python,
        inside=inside,
        srun_options=srun_options,
        checkout=str(CHECKOUT),
        arguments=[f"recipe={recipe}", *(one for one in arguments if not one.startswith("recipe="))],
        output_dir=str(output_dir.absolute()),
        stopped_file=STOPPED_FILE,
        stopped_status=STOPPED,
    )


def _sbatch_options(job: Job, recipe: str, output_dir: Path) -> list[str]:
    path = str(output_dir.absolute())
    if not re.fullmatch(r"[\w./+@:,=-]+", path):
        remedy = "Slurm's log is written there; use a path without spaces, quotes, % and similar characters."
        raise UserError("output_dir", path, remedy)
    options = [
        f"--job-name=eagle31-{recipe}",
        f"--output={path}/slurm-%j.out",
        "--open-mode=append",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        "--requeue",
        f"--signal=B:USR1@{job.save_seconds}",
    ]
    if job.gpus_per_node:
        options.append(f"--gpus-per-node={job.gpus_per_node}")
    if not any(one.startswith("--cpus-per-task") for one in job.sbatch):
        options.append("--exclusive")
        if not any(one.startswith("--mem") for one in job.sbatch):
            options.append("--mem=0")  # all of the node's; Slurm's default may be a part
    return [*options, *job.sbatch]


def check_job(job: Job, config: RunConfig, resumes: bool) -> None:
    """Refuse what the run would refuse only after the queue, and nodes for servers that it would not use.

    Args:
        resumes: whether the run has trained already; it then resumes on any number of processes.

    Raises:
        UserError: names the option or the setting.
    """
    for name, least in (("nodes", 1), ("servers_per_node", 1), ("gpus_per_node", 0)):
        if (given := getattr(job, name)) < least:
            raise UserError(f"--{name.replace('_', '-')}", given, f"It must be at least {least}.")
    if not 0 <= job.target_nodes < job.nodes:
        remedy = f"It must be less than --nodes ({job.nodes}): a node must be left to train on."
        raise UserError("--target-nodes", job.target_nodes, remedy)
    if not resumes:
        size = job.num_trainers * job.num_processes
        check_divisible(config.train.rows_per_step, size, config.train.row_ranks)
    if not job.target_nodes:
        return
    if not any(uses_servers(config, stage) for stage in Stage):
        remedy = "Nothing in this run uses vLLM: set capture=vllm, capture=vllm_online, or give 0."
        raise UserError("--target-nodes", job.target_nodes, remedy)
    if config.vllm.servers:
        raise UserError("--target-nodes", job.target_nodes, "vllm.servers names servers already: give 0.")
