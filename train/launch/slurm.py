"""Slurm batch scripts for runs."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from data.addresses import is_loopback
from data.batches.row_schedule import check_divisible
from data.transport.mooncake_store import address
from eagle31.errors import UserError
from train.config.capture import CaptureConfig, CaptureMode, TransportKind
from train.config.launcher import LauncherConfig, LauncherKind, sets_launcher
from train.config.run import RunConfig, uses_vllm
from train.config.training import TrainConfig
from train.config.vllm import Placement
from train.stop import STOPPED, STOPPED_FILE

TEMPLATE = "slurm.sh.jinja"
# Each node would take these for itself.


@dataclass(frozen=True)
class Submission:
    """A run to submit.

    Args:
        arguments: those of `train/main.py`.
        python: the Python that runs it.
        mooncake_port: the port of the Mooncake master that the job starts; None: it starts none.
    """

    arguments: Sequence[str]
    recipe: str
    output_dir: Path
    python: str
    checkout: Path
    mooncake_port: int | None = None


def render(submission: Submission, launcher: LauncherConfig) -> str:
    """Return the batch script.

    It contains no environment variables, because sbatch passes on the submitter's, tokens included.

    Raises:
        UserError: sbatch would misread the output directory's path.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quoted"] = shlex.quote
    first, own = f"recipe={submission.recipe}", run_arguments(submission.arguments)
    return environment.get_template(TEMPLATE).render(
        options=sbatch_options(submission, launcher),
        setup=launcher.setup,
        python=submission.python,
        checkout=str(submission.checkout),
        arguments=[first, *(one for one in own if not one.startswith("recipe="))],
        recipe=submission.recipe,
        num_servers=launcher.capture_nodes,
        servers_per_node=launcher.servers_per_node,
        num_trainers=num_trainers(launcher),
        num_processes=num_processes(launcher),
        capture_port=launcher.capture_port,
        signal_seconds=launcher.signal_seconds,
        max_requeues=launcher.max_requeues,
        stopped_file=STOPPED_FILE,
        stopped_status=STOPPED,
        output_dir=str(submission.output_dir.absolute()),
        mooncake_port=submission.mooncake_port,
    )


def run_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without those of the launcher, which have no effect in `train/main.py`."""
    return [one for one in arguments if not sets_launcher(one)]


def num_trainers(launcher: LauncherConfig) -> int:
    """Return the number of nodes that train."""
    return launcher.nodes - launcher.capture_nodes


def num_processes(launcher: LauncherConfig) -> int:
    """Return the number of processes on each node that trains."""
    return max(launcher.gpus_per_node or 0, 1)


def mooncake_port(capture: CaptureConfig) -> int | None:
    """Return the port of the Mooncake master that a job starts; None where the run needs none or names one.

    Raises:
        UserError: `capture.mooncake.master` is not an address.
    """
    online = capture.mode is CaptureMode.online and capture.transport is TransportKind.mooncake
    if not online:
        return None
    host, port = address(capture.mooncake.master)
    return port if is_loopback(host) else None


def check_rows(train: TrainConfig, launcher: LauncherConfig) -> None:
    """Refuse rows that the run would refuse only after the queue and the capture.

    Raises:
        UserError: a step's rows are not a multiple of the number of processes.
    """
    size = num_trainers(launcher) * num_processes(launcher)
    check_divisible(train.rows_per_step, train.rows_per_step_start, size)


def check_capture_nodes(config: RunConfig) -> None:
    """Refuse nodes for servers that the run would not use.

    Raises:
        UserError: nothing uses vLLM, or the servers are placed elsewhere.
    """
    vllm, nodes = config.vllm, config.launcher.capture_nodes
    if not nodes:
        return
    if config.launcher.kind is not LauncherKind.slurm:
        remedy = "Only jobs of Slurm start servers on other nodes: set launcher=slurm, or 0."
        raise UserError("launcher.capture_nodes", nodes, remedy)
    if not uses_vllm(config):
        remedy = "Nothing in this run uses vLLM: set capture=vllm, capture=vllm_online, or 0."
        raise UserError("launcher.capture_nodes", nodes, remedy)
    if vllm.servers:
        raise UserError("launcher.capture_nodes", nodes, "vllm.servers names servers already; set it to 0.")
    if vllm.placement in (Placement.shared, Placement.split):
        remedy = "With launcher.capture_nodes, servers are on nodes of their own: set auto or apart."
        raise UserError("vllm.placement", vllm.placement.value, remedy)
    if vllm.gpu_memory_fraction is not None:
        remedy = "Servers on other nodes take vllm.engine_args.gpu_memory_utilization; set it to null."
        raise UserError("vllm.gpu_memory_fraction", vllm.gpu_memory_fraction, remedy)


def sbatch_options(submission: Submission, launcher: LauncherConfig) -> list[str]:
    """Return the options of sbatch.

    Raises:
        UserError: sbatch would misread the path of the log.
    """
    output_dir = str(submission.output_dir.absolute())
    if not re.fullmatch(r"[\w./+@:,=-]+", output_dir):
        remedy = "Slurm's log is written there; use a path without spaces, quotes, % and similar characters."
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
