"""The recipe's schema for `scripts/submit`: where the processes of a run start."""

import re
from dataclasses import dataclass, field
from enum import Enum

from eagle31.errors import UserError

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")
_MEMORY = re.compile(r"\d+[KMGT]?")
_MAX_SIGNAL_SECONDS = 65535  # the most that sbatch --signal takes


class LauncherKind(Enum):
    local = "local"  # torchrun on this machine
    slurm = "slurm"  # a Slurm batch job


@dataclass
class LauncherConfig:
    """Where scripts/submit starts a run's processes; elsewhere it has no effect."""

    kind: LauncherKind = LauncherKind.local  # How processes are started.
    # GPUs of a node, with a process each. 0: one process per node, on its CPU. null: all GPUs of this
    # machine, with kind=local.
    gpus_per_node: int | None = None
    nodes: int = 1  # Number of nodes, with kind=slurm as all further keys.
    # How many of the nodes, the last ones, run vLLM servers for capture.source=vllm; the others train.
    capture_nodes: int = 0
    servers_per_node: int = 1  # vLLM servers of a capture node, which share its GPUs evenly.
    capture_port: int = 8000  # Port of the first vLLM server of a node; those of the others follow.
    # CPU cores of a node, which runs one task. null: all of them (--exclusive).
    cpus_per_task: int | None = None
    mem: str | None = None  # Memory of a node, such as 512G. 0: all of it.
    partition: str | None = None  # Slurm partition.
    account: str | None = None  # Slurm account.
    qos: str | None = None  # Slurm quality of service.
    constraint: str | None = None  # Features that a node must have.
    time: str | None = None  # Time limit as sbatch takes it: minutes, hours:minutes:seconds, days-hours, ...
    # Seconds before the time limit at which the run saves a checkpoint and the job is requeued.
    signal_seconds: int = 300
    # Number of requeues after which the job fails; Slurm counts preemptions too.
    max_requeues: int = 20
    sbatch: list[str] = field(default_factory=list)  # Further options of sbatch, such as --reservation=NAME.
    setup: list[str] = field(default_factory=list)  # Shell lines that run first, such as "module load cuda".


def check_launcher(launcher: LauncherConfig) -> None:
    """Raise UserError for values that Slurm or torchrun would refuse only once the job starts."""
    _check_counts(launcher)
    for name in ("partition", "account", "qos", "constraint"):
        value = getattr(launcher, name)
        if value is not None and not re.fullmatch(r"[^\s\"'#\\]+", value):
            raise UserError(f"launcher.{name}", value, "It must be one word without quotes.")
    if launcher.mem is not None and not _MEMORY.fullmatch(launcher.mem):
        raise UserError("launcher.mem", launcher.mem, "Give a number followed by K, M, G or T, such as 512G.")
    if launcher.time is not None and time_seconds(launcher.time) <= launcher.signal_seconds:
        raise UserError(
            "launcher.time",
            launcher.time,
            f"It must be longer than launcher.signal_seconds ({launcher.signal_seconds}).",
        )
    for option in launcher.sbatch:
        if not option.startswith("-") or "\n" in option:
            raise UserError("launcher.sbatch", option, "Give options of sbatch, such as --reservation=NAME.")
    if launcher.kind is LauncherKind.slurm and launcher.gpus_per_node is None:
        raise UserError("launcher.gpus_per_node", None, "Give the GPUs of a node, or 0 for a CPU run.")


def _check_counts(launcher: LauncherConfig) -> None:
    if launcher.nodes < 1:
        raise UserError("launcher.nodes", launcher.nodes, "It must be greater than 0.")
    if launcher.gpus_per_node is not None and launcher.gpus_per_node < 0:
        raise UserError("launcher.gpus_per_node", launcher.gpus_per_node, "Give 0 for a CPU run, or more.")
    if not 0 <= launcher.capture_nodes < launcher.nodes:
        remedy = f"It must be less than launcher.nodes ({launcher.nodes}): a node must be left to train on."
        raise UserError("launcher.capture_nodes", launcher.capture_nodes, remedy)
    if launcher.servers_per_node < 1:
        raise UserError("launcher.servers_per_node", launcher.servers_per_node, "It must be greater than 0.")
    if not 1024 <= launcher.capture_port <= 65535:
        raise UserError("launcher.capture_port", launcher.capture_port, "Choose a port from 1024 to 65535.")
    if launcher.max_requeues < 0:
        remedy = "Give 0 for a job that is never requeued, or more."
        raise UserError("launcher.max_requeues", launcher.max_requeues, remedy)
    if launcher.cpus_per_task is not None and launcher.cpus_per_task < 1:
        remedy = "Give at least 1, or null for the whole node."
        raise UserError("launcher.cpus_per_task", launcher.cpus_per_task, remedy)
    if not 0 < launcher.signal_seconds <= _MAX_SIGNAL_SECONDS:
        remedy = f"It must be in [1, {_MAX_SIGNAL_SECONDS}]."
        raise UserError("launcher.signal_seconds", launcher.signal_seconds, remedy)


def sets_launcher(argument: str) -> bool:
    """Return whether an argument of the command line chooses or changes the launcher."""
    return argument.lstrip("+~").startswith(("launcher=", "launcher."))


def time_seconds(text: str) -> int:
    """Return a time limit of sbatch in seconds.

    Raises:
        UserError: sbatch does not take it.
    Source: sbatch(1), --time.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        remedy = (
            "Give minutes, minutes:seconds, hours:minutes:seconds, days-hours, or days-hours:minutes:seconds."
        )
        raise UserError("launcher.time", text, remedy)
    parts = [int(part) for part in match["clock"].split(":")]
    if match["days"] is not None:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = [*parts, 0, 0][:3]
        return ((int(match["days"]) * 24 + hours) * 60 + minutes) * 60 + seconds
    # minutes, minutes:seconds or hours:minutes:seconds
    hours, minutes, seconds = {1: [0, *parts, 0], 2: [0, *parts], 3: parts}[len(parts)]
    return (hours * 60 + minutes) * 60 + seconds
