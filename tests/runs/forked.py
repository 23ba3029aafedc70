"""Commands in processes that start at once: forks of a server that has imported what a run needs.

The imports take most of the time of a short run. All of pytest's workers share one such server, the standard
library's `forkserver`. A test that looks at memory, threads, or torchrun itself starts a real interpreter.
"""

import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.processes import free_ports

ROOT = Path(__file__).resolve().parents[2]
RUN_SECONDS = 1100.0
# A fork has only the thread that makes it; PyArrow starts one when it is imported.
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.runs.imported"])


def environment() -> dict[str, str]:
    """Return the environment of a run that has one thread and no network."""
    own = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
    # A test that ran W&B in this process leaves the address of its service; runs that share one share ids.
    return {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"} | own


@dataclass
class Ranks:
    """The processes of a run, started as torchrun starts them."""

    processes: Sequence[BaseProcess]
    log: Path

    def wait(self, seconds: float = RUN_SECONDS) -> int:
        """Wait until all have ended, and return the first exit status that is not zero.

        As torchrun does, it ends the others when one fails.
        """
        status, left = 0, list(self.processes)
        while left and status == 0:
            ended = multiprocessing.connection.wait([one.sentinel for one in left], timeout=seconds)
            if not ended:
                self.kill()
                raise AssertionError(f"The run takes longer than {seconds:.0f} s:\n{self.printed()}")
            for one in [one for one in left if one.sentinel in ended]:
                one.join()
                left.remove(one)
                status = status or one.exitcode or 0
        for one in left:
            one.terminate()
            one.join(30)
        self.kill()
        return status

    def kill(self) -> None:
        for one in self.processes:
            if one.is_alive():
                one.kill()
            one.join()

    def send_signal(self, number: int) -> None:
        for one in self.processes:
            assert one.pid is not None
            os.kill(one.pid, number)

    def printed(self) -> str:
        return self.log.read_text(errors="replace")


def start(
    script: str,
    *arguments: object,
    log: Path,
    num_processes: int = 1,
    num_nodes: int = 1,
    torchrun: bool = True,
    variables: Mapping[str, str] | None = None,
) -> Ranks:
    """Start a command of the checkout.

    Args:
        log: a file for what all processes print.
        num_nodes: between which the processes are divided; all are on this host.
        torchrun: set the variables of a rank that torchrun starts.
    """
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    processes, per_node = [], num_processes // num_nodes
    for rank in range(num_processes):
        own = environment() | dict(variables or {})
        if torchrun:
            own |= rendezvous | {
                name: str(value)
                for name, value in (
                    ("RANK", rank),
                    ("LOCAL_RANK", rank % per_node),
                    ("WORLD_SIZE", num_processes),
                    ("LOCAL_WORLD_SIZE", per_node),
                    ("GROUP_RANK", rank // per_node),
                    ("GROUP_WORLD_SIZE", num_nodes),
                )
            }
        process = CONTEXT.Process(target=_run, args=(script, list(map(str, arguments)), own, log))
        process.start()
        processes.append(process)
    return Ranks(processes, log)


def run(
    script: str,
    *arguments: object,
    num_processes: int = 1,
    status: int | None = 0,
    seconds: float = RUN_SECONDS,
    variables: Mapping[str, str] | None = None,
    torchrun: bool = True,
) -> str:
    """Run a command to its end, and return what it printed.

    Args:
        status: the exit status that it must have; None for any.
    """
    with tempfile.TemporaryDirectory() as directory:
        ranks = start(
            script,
            *arguments,
            log=Path(directory) / "log",
            num_processes=num_processes,
            variables=variables,
            torchrun=torchrun,
        )
        try:
            found = ranks.wait(seconds)
        finally:
            ranks.kill()
        assert status in (None, found), f"exit status {found} instead of {status}:\n{ranks.printed()}"
        return ranks.printed()


def _run(script: str, arguments: list[str], variables: dict[str, str], log: Path) -> None:
    """Be the command, in the fork, which ends when the test's process does, however that ends."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(ROOT)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(written, descriptor)
    sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(ROOT / Path(script).parent))
    runpy.run_path(str(ROOT / script), run_name="__main__")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
