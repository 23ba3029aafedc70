"""The processes of the soak's run: finding them by their kind, measuring them, killing one."""

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from data.processes.parent import module_command

# A part of the command line or of the name, by the kind of the process; the first that fits counts.
_KINDS = {
    "producer": "data.capture.hf_worker",
    "engine": "EngineCor",
    "server": "vllm.entrypoints",
    "supervisor": "supervisor.py",
}
# What is killed, in turn, and what the kill is meant for.
_VICTIMS = {"hf": ("producer",), "vllm": ("engine", "server")}


@dataclass(frozen=True)
class Sample:
    """What one kind of processes holds at a time, summed over them."""

    seconds: float
    kind: str
    processes: int
    memory_bytes: int  # resident
    files: int
    threads: int


class SoakProcesses:
    """A run and all that it has started.

    Args:
        log: what the run prints.
    """

    def __init__(self, arguments: list[str], log: Path) -> None:
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [*module_command("train.bench.soak.trainer"), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._turn = 0

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def by_kind(self) -> dict[str, list[psutil.Process]]:
        """Return the processes, the trainer itself among them."""
        found: dict[str, list[psutil.Process]] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            trainer = psutil.Process(self.process.pid)
            found["trainer"] = [trainer]
            for child in trainer.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    found.setdefault(kind_of(child), []).append(child)
        return found

    def measure(self, seconds: float) -> Iterator[Sample]:
        """Yield what each kind of processes holds now."""
        for kind, processes in self.by_kind().items():
            numbers = [one for one in map(_numbers, processes) if one is not None]
            if numbers:
                yield Sample(seconds, kind, len(numbers), *map(sum, zip(*numbers, strict=True)))

    def kill_next(self, source: str) -> str | None:
        """Kill the next process in turn; return its kind, or None where there is none now."""
        victims = _VICTIMS[source]
        kind = victims[self._turn % len(victims)]
        processes = sorted(self.by_kind().get(kind, []), key=lambda one: one.pid)
        if not processes:
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            processes[self._turn // len(victims) % len(processes)].kill()
            self._turn += 1
            return kind
        return None

    def end(self) -> int:
        """Have the run save a checkpoint and end; return its status."""
        self.process.terminate()
        try:
            return self.process.wait(120)
        except subprocess.TimeoutExpired:
            for processes in self.by_kind().values():
                for one in processes:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
            return self.process.wait()


def kind_of(process: psutil.Process) -> str:
    text = " ".join([process.name(), *process.cmdline()])
    return next((kind for kind, part in _KINDS.items() if part in text), "other")


def _numbers(process: psutil.Process) -> tuple[int, int, int] | None:
    try:
        return process.memory_info().rss, process.num_fds(), process.num_threads()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
