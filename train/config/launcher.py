"""The recipe's schema for `scripts/submit`: where the run's processes start. The run reads none of it."""

import re
from dataclasses import dataclass, field
from enum import Enum

from eagle31.errors import UserError

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")
_MEMORY = re.compile(r"\d+[KMGT]?")
_MAX_SIGNAL_SECONDS = 65535  # sbatch --signal takes no more


class LauncherKind(Enum):
    local = "local"
    slurm = "slurm"


@dataclass
class LauncherConfig:
    """What is null is the cluster's choice."""

    kind: LauncherKind = LauncherKind.local
    gpus_per_node: int = 0  # a process each; 0: one process a node, on its CPU
    # Of slurm alone:
    nodes: int = 1
    capture_nodes: int = 0  # the first of them run vLLM servers for capture.source=vllm, the others train
    capture_port: int = 8000  # where the servers listen
    cpus_per_task: int | None = None  # of a node, which runs one task; null: the whole node (--exclusive)
    mem: str | None = None  # of a node, such as 512G; 0 is all of it
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: str | None = None  # as sbatch takes it: minutes, hours:minutes:seconds, days-hours, ...
    signal_seconds: int = 300  # before the limit the run is told to save, and the job queues again
    max_requeues: int = 20  # then the job fails; Slurm counts requeues by others too, such as preemption
    sbatch: list[str] = field(default_factory=list)  # further options of sbatch, such as --reservation=x
    setup: list[str] = field(default_factory=list)  # shell lines before the run: module load, export, ...


def check_launcher(launcher: LauncherConfig) -> None:
    """Refuses values that Slurm or torchrun would refuse after the queue.

    Raises:
        UserError: names the key, the value and the remedy.
    """
    _check_counts(launcher)
    for name in ("partition", "account", "qos", "constraint"):
        value = getattr(launcher, name)
        if value is not None and not re.fullmatch(r"[^\s\"'#\\]+", value):
            raise UserError(f"launcher.{name}", value, "It must be one word without quotes.")
    if launcher.mem is not None and not _MEMORY.fullmatch(launcher.mem):
        raise UserError(
            "launcher.mem", launcher.mem, "Give a number with K, M, G or T behind it, such as 512G."
        )
    if launcher.time is not None and time_seconds(launcher.time) <= launcher.signal_seconds:
        raise UserError(
            "launcher.time",
            launcher.time,
            f"It must be longer than launcher.signal_seconds ({launcher.signal_seconds}).",
        )
    for option in launcher.sbatch:
        if not option.startswith("-") or "\n" in option:
            raise UserError("launcher.sbatch", option, "Give options of sbatch, such as --reservation=NAME.")


def _check_counts(launcher: LauncherConfig) -> None:
    if launcher.nodes < 1:
        raise UserError("launcher.nodes", launcher.nodes, "It must be greater than 0.")
    if launcher.gpus_per_node < 0:
        raise UserError("launcher.gpus_per_node", launcher.gpus_per_node, "Give 0 for a CPU run, or more.")
    if not 0 <= launcher.capture_nodes < launcher.nodes:
        remedy = f"Must leave a node to train on: launcher.nodes ({launcher.nodes}) counts them all."
        raise UserError("launcher.capture_nodes", launcher.capture_nodes, remedy)
    if not 1024 <= launcher.capture_port <= 65535:
        raise UserError("launcher.capture_port", launcher.capture_port, "Choose a port from 1024 to 65535.")
    if launcher.max_requeues < 0:
        remedy = "Give 0 for a job that never queues again by itself, or more."
        raise UserError("launcher.max_requeues", launcher.max_requeues, remedy)
    if launcher.cpus_per_task is not None and launcher.cpus_per_task < 1:
        remedy = "Give at least 1, or null for the whole node."
        raise UserError("launcher.cpus_per_task", launcher.cpus_per_task, remedy)
    if not 0 < launcher.signal_seconds <= _MAX_SIGNAL_SECONDS:
        remedy = f"Must lie in [1, {_MAX_SIGNAL_SECONDS}]."
        raise UserError("launcher.signal_seconds", launcher.signal_seconds, remedy)


def time_seconds(text: str) -> int:
    """A time limit of sbatch in seconds.

    Raises:
        UserError: it is none.
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
