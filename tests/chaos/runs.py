"""A small run that is killed at chosen points and started again with the same command."""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import psutil

from data.embedded.target import EmbeddedTarget
from tests.chaos.library import log_variables, preloads, stop_variables
from tests.chaos.points import Change, KillPoint, Victim, read_changes
from tests.preloaded.start import interpreters
from tests.train.reporting.hub_server import TOKEN, Hub
from tests.train.small_run import RECIPE, RUN_VARIABLE, arguments, processes_of
from tests.train.torchrun import ROOT, environment, preloaded_python, torchrun_command

MAIN = str(Path(__file__).with_name("run_main.py").relative_to(ROOT))
REPO = "someone/drafter"
WAIT_SECONDS = 180.0  # for a run to reach a point or its end
ORPHAN_SECONDS = 60.0  # for the workers of a killed launcher to end
SMALLER = (
    "capture.max_samples=48",
    "capture.shard_tokens=1500",
    "capture.batch_tokens=1024",
    "train.max_steps=8",
    "train.save_every=2",
    "train.keep_checkpoints=2",
    "train.validate_every=4",
    "train.diagnose_every=8",
    "train.rows_per_step=2",
    "data.num_validation=4",
    "data.num_test=3",
    "evaluate.max_new_tokens=12",
    "export.dtype=float32",
    f"hub.repo_id={REPO}",
)


@dataclass
class ChaosRun:
    """The runs of one command.

    Args:
        directory: has the output directory, the logs and the notes of `kill_points.c`.
        hub: to which the run pushes; it is this run's alone.
        settings: further ones of the command.
    """

    directory: Path
    target: EmbeddedTarget
    hub: Hub
    num_processes: int = 1
    settings: tuple[str, ...] = ()
    num_starts: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True)

    @property
    def output(self) -> Path:
        return self.directory / "run"

    @property
    def log(self) -> Path:
        """What the newest start has printed."""
        return self.directory / f"start-{self.num_starts}.log"

    def finish(self) -> None:
        """Start the command, and wait until it has succeeded."""
        with self._started({}) as process:
            self._wait_for_success(process)

    def finish_logged(self) -> list[Change]:
        """Do the same, and return what it changed."""
        notes = self._new_notes()
        with self._started(log_variables(notes, self.output)) as process:
            self._wait_for_success(process)
        return read_changes(notes / "points")

    def kill_at(self, point: KillPoint) -> float:
        """Start the command, kill the victim when the point is reached, and wait until no process is left.

        Returns:
            The seconds from the kill until no process was left and the output directory's lock was free.
        """
        killed = self._kill_at_request(point) if point.is_request else self._kill_at_change(point)
        self.wait_until_free(ORPHAN_SECONDS)
        return time.monotonic() - killed

    def wait_until_free(self, seconds: float) -> None:
        """Wait until no process uses the output directory, and its lock is free."""
        deadline = time.monotonic() + seconds
        while (found := self._users()) or not self._lock_is_free():
            assert time.monotonic() < deadline, f"{found} still use {self.output}:\n{self.printed()}"
            time.sleep(0.1)

    def printed(self) -> str:
        return self.log.read_text(errors="replace")[-5000:]

    def remove(self) -> None:
        shutil.rmtree(self.directory)

    def _kill_at_change(self, point: KillPoint) -> float:
        notes = self._new_notes()
        variables = stop_variables(point, notes, self.output)
        with self._started(variables, real=point.victim is Victim.launcher) as process:
            reached = notes / "reached"
            self._wait_for(process, reached.exists, point)
            # The process writes its id after it has made the file, and stops after that.
            while not (content := reached.read_text()):
                time.sleep(0.01)
            stopped = psutil.Process(int(content))
            while stopped.status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
            return self._kill(process, point, stopped)

    def _kill_at_request(self, point: KillPoint) -> float:
        reached, killed, number = threading.Event(), threading.Event(), iter(range(1, 1000))

        def observe(moment: str, path: str) -> None:
            if moment == point.operation and fnmatch(path, point.pattern) and next(number) == point.number:
                reached.set()
                killed.wait(WAIT_SECONDS)

        self.hub.observe = observe
        try:
            with self._started({}) as process:
                self._wait_for(process, reached.is_set, point)
                return self._kill(process, point, None)
        finally:
            self.hub.observe = lambda moment, path: None
            killed.set()

    def _kill(self, process: subprocess.Popen, point: KillPoint, stopped: psutil.Process | None) -> float:
        killed = time.monotonic()
        if point.victim is Victim.run:
            for one in [process, *self._clients()]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        elif point.victim is Victim.rank:
            assert stopped is not None
            stopped.kill()
        else:
            assert point.victim is Victim.launcher
            assert stopped is not None
            process.kill()
            stopped.send_signal(signal.SIGCONT)
        process.wait(timeout=WAIT_SECONDS)
        return killed

    def _wait_for(self, process: subprocess.Popen, reached: object, point: KillPoint) -> None:
        assert callable(reached)
        deadline = time.monotonic() + WAIT_SECONDS
        while not reached():
            assert process.poll() is None or reached(), f"{point} was not reached:\n{self.printed()}"
            assert time.monotonic() < deadline, f"{point} was not reached in time:\n{self.printed()}"
            time.sleep(0.01)

    def _wait_for_success(self, process: subprocess.Popen) -> None:
        assert process.wait(timeout=WAIT_SECONDS) == 0, self.printed()
        self.wait_until_free(10.0)

    @contextlib.contextmanager
    def _started(self, variables: dict[str, str], *, real: bool = False) -> Iterator[subprocess.Popen]:
        """Start the command.

        Args:
            real: in real interpreters, whose ranks are torchrun's children, instead of forks.
        """
        python = sys.executable if real else preloaded_python()
        if real:
            variables = variables | preloads(interpreters())
        command = torchrun_command(
            MAIN,
            f"recipe={RECIPE}",
            *arguments(self.target, self.output),
            *SMALLER,
            *self.settings,
            num_processes=self.num_processes,
        )
        self.num_starts += 1
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                [python, *command[1:]],
                cwd=ROOT,
                env=environment()
                | {"PYTHON_EXEC": python, RUN_VARIABLE: str(self.output)}
                | {"HF_ENDPOINT": self.hub.url, "HF_TOKEN": TOKEN}
                | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                for one in [process, *self._clients()]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
                process.wait()

    def _new_notes(self) -> Path:
        notes = self.directory / f"notes-{self.num_starts}"
        notes.mkdir()
        return notes

    def _clients(self) -> list[psutil.Process]:
        """Return the processes that the run has started as programs."""
        return processes_of(self.output)

    def _users(self) -> list[int]:
        """Return the processes of the run, and those that have a file of it open."""
        found = {process.pid for process in self._clients()}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                opened = (os.readlink(link) for link in (process / "fd").iterdir())
                if any(path.startswith(f"{self.directory}/") for path in opened):
                    found.add(int(process.name))
        return sorted(found - {os.getpid()})

    def _lock_is_free(self) -> bool:
        try:
            file = (self.output / ".lock").open()
        except FileNotFoundError:
            return True
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True


def resumed_after(printed: str) -> int | None:
    """Return the step after which a run says that it resumed."""
    found = re.search(r"resuming after step (\d+)", printed)
    return int(found[1]) if found else None
