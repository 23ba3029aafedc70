"""The processes of the soak: starting them, finding them by their kind, measuring what they hold."""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

# A part of the command line or of the name, by the kind of the process; the first that fits counts.
_KINDS = {
    "trainer": "train.bench.soak.trainer",
    "producers": "data.capture.hf_worker",
    "supervisors": "supervisor.py",
    "engines": "EngineCor",
    "API processes": "vllm.entrypoints",
}
_OTHER = "others"
# More would slow each other down on a small machine, and vLLM would bind several servers to the same cores.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@dataclass(frozen=True)
class Sample:
    """What one kind of processes holds at a time, summed over them."""

    seconds: float
    kind: str
    processes: int
    memory_bytes: int  # resident
    files: int
    threads: int


class Program:
    """A command of the soak and all processes that it has started.

    Args:
        log: what it prints.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=os.environ | _ONE_THREAD,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def tail(self) -> str:
        """The last lines of the log."""
        return " | ".join(self.log.read_text(errors="replace").splitlines()[-8:])

    def by_kind(self) -> dict[str, list[psutil.Process]]:
        """Return the processes."""
        found: dict[str, list[psutil.Process]] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            for one in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    found.setdefault(kind_of(one), []).append(one)
        return found

    def measure(self, seconds: float) -> Iterator[Sample]:
        """Yield what each kind of processes holds now."""
        for kind, processes in self.by_kind().items():
            numbers = [one for one in map(_numbers, processes) if one is not None]
            if numbers:
                yield Sample(seconds, kind, len(numbers), *map(sum, zip(*numbers, strict=True)))

    def end(self) -> int:
        """Have it save what it has, and end; return its status."""
        self.process.terminate()
        try:
            return self.process.wait(120)
        except subprocess.TimeoutExpired:
            for processes in self.by_kind().values():
                for one in processes:
                    kill(one)
            return self.process.wait()


def kind_of(process: psutil.Process) -> str:
    text = " ".join([process.name(), *process.cmdline()])
    return next((kind for kind, part in _KINDS.items() if part in text), _OTHER)


def kill(process: psutil.Process) -> bool:
    """Kill a process with SIGKILL; return whether it was there."""
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return False
    return True


def _numbers(process: psutil.Process) -> tuple[int, int, int] | None:
    try:
        return process.memory_info().rss, process.num_fds(), process.num_threads()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
