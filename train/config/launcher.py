"""The recipe's schema for `scripts/submit`: where the processes of a run start."""

import re
from dataclasses import dataclass

from eagle31.choice import Choice
from eagle31.errors import UserError
from train.config.setting import setting

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")
_MEMORY = re.compile(r"\d+[KMGT]?")


class LauncherKind(Choice):
    local = "local", "torchrun on this machine"
    slurm = "slurm", "a Slurm batch job"


@dataclass
class LauncherConfig:
    """Where scripts/submit starts a run's processes; elsewhere it has no effect."""

    kind: LauncherKind = setting(LauncherKind.local, "How processes are started.")
    gpus_per_node: int | None = setting(
        None,
        "GPUs of a node, with a process each. 0: one process per node, on its CPU. null: all GPUs of this "
        "machine, with kind=local.",
        ge=0,
        le=1024,
    )
    nodes: int = setting(1, "Number of nodes, with kind=slurm as all further keys.", ge=1)
    capture_nodes: int = setting(
        0,
        "How many of the nodes, the last ones, run vLLM servers for capture.source=vllm; the others train.",
        ge=0,
    )
    servers_per_node: int = setting(
        1, "vLLM servers of a capture node, which share its GPUs evenly.", ge=1, le=1024
    )
    capture_port: int = setting(
        8000, "Port of the first vLLM server of a node; those of the others follow.", ge=1024, le=65535
    )
    cpus_per_task: int | None = setting(
        None, "CPU cores of a node, which runs one task. null: all of them (--exclusive).", ge=1
    )
    mem: str | None = setting(None, "Memory of a node, such as 512G. 0: all of it.")
    partition: str | None = setting(None, "Slurm partition.")
    account: str | None = setting(None, "Slurm account.")
    qos: str | None = setting(None, "Slurm quality of service.")
    constraint: str | None = setting(None, "Features that a node must have.")
    time: str | None = setting(
        None, "Time limit as sbatch takes it: minutes, hours:minutes:seconds, days-hours, ..."
    )
    signal_seconds: int = setting(
        300,
        "Seconds before the time limit at which the run saves a checkpoint and the job is requeued.",
        ge=1,
        le=65535,
    )
    max_requeues: int = setting(
        20, "Number of requeues after which the job fails; Slurm counts preemptions too.", ge=0
    )
    sbatch: list[str] = setting([], "Further options of sbatch, such as --reservation=NAME.")
    setup: list[str] = setting([], 'Shell lines that run first, such as "module load cuda".')


def check_launcher(launcher: LauncherConfig) -> None:
    """Raise UserError for values that Slurm or torchrun would refuse only once the job starts."""
    if launcher.capture_nodes >= launcher.nodes:
        remedy = f"It must be less than launcher.nodes ({launcher.nodes}): a node must be left to train on."
        raise UserError("launcher.capture_nodes", launcher.capture_nodes, remedy)
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
