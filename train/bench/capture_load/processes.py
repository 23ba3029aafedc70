"""The servers and clients of the load test: starting, ending and stopping their processes."""

import contextlib
import json
import os
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil

from data.processes.parent import module_command
from data.vllm.environment import find_python
from data.vllm.server_process import ServerProcess
from train.bench.capture_load.inputs import LoadSettings, capture_engine

_START_SECONDS = 600.0
_CLIENT = "train.bench.capture_load.client"
_SWITCH = "slow"


class LoadServer:
    """One vLLM server, which is started again when it dies or hangs.

    Args:
        slow: whether its disk is slow while the switch is on.
        stall_seconds: the time without progress after which it counts as hung.
    """

    def __init__(self, name: str, settings: LoadSettings, slow: bool, stall_seconds: float) -> None:
        self.name = name
        work = Path(settings.work)
        with _preloaded(work, slow):
            self.process = ServerProcess(
                capture_engine(settings.spec, work / "stores").command_line(),
                host="127.0.0.1",
                port=None,
                key=None,
                devices=None,
                log=work / f"{name}.log",
                limit_seconds=_START_SECONDS,
                stall_seconds=stall_seconds,
            )

    def signal_engine(self, number: signal.Signals) -> int:
        """Send a signal to the engine; return its process id."""
        assert self.process.process_id is not None
        children = psutil.Process(self.process.process_id).children(recursive=True)
        [engine] = [child for child in children if "EngineCor" in _command_of(child)]
        os.kill(engine.pid, number)
        return engine.pid

    def signal_api(self, number: signal.Signals) -> int:
        """Send a signal to the process that answers requests; return its process id."""
        assert self.process.process_id is not None
        os.kill(self.process.process_id, number)
        return self.process.process_id

    @property
    def answers(self) -> bool:
        return self.process.is_healthy(seconds=2.0)


class LoadClient:
    """One client, which is started again when it has been killed.

    Attributes:
        failures: the ends of its log whenever it ended for another reason.
    """

    def __init__(self, name: str, kind: str, settings: LoadSettings) -> None:
        self.name, self.kind, self._settings = name, kind, settings
        self.failures: list[str] = []
        self.begun = Path(settings.work) / f"{name}.begun"
        self._log = Path(settings.work) / f"{name}.log"
        self._process = self._start()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def process_id(self) -> int:
        return self._process.pid

    def look_after(self) -> None:
        """Start the client again where it has ended and is not finished."""
        status = self._process.poll()
        if status is None or (status == 0 and self._settings.stop_file.exists()):
            return
        if status != -signal.SIGKILL:
            self.failures.append(f"status {status}: {self._log.read_text()[-2000:]}")
        self._process = self._start()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        self.begun.unlink(missing_ok=True)
        command = [*module_command(_CLIENT), json.dumps(asdict(self._settings)), self.name, self.kind]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )


def compile_slow_disk(work: Path) -> None:
    """Compile the library that makes a server's disk slow."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    source = Path(__file__).with_name("slow_disk.c")
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(work / "slow_disk.so"), str(source), "-ldl"]
    subprocess.run(command, check=True)


def switch_slow_disk(work: Path, on: bool) -> None:
    """Make the disk of the slow server slow, or fast again."""
    (work / _SWITCH).touch() if on else (work / _SWITCH).unlink(missing_ok=True)


@contextlib.contextmanager
def _preloaded(work: Path, slow: bool) -> Iterator[None]:
    """Set the variables of a server that starts now, also when it starts again."""
    changes = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    if slow:
        openmp = find_python().parent.parent / "lib" / "libiomp5.so"  # what vLLM needs there
        libraries = [str(work / "slow_disk.so"), *([str(openmp)] if openmp.exists() else [])]
        switches = {"SLOW_DISK": str((work / "stores").resolve()), "SLOW_DISK_SWITCH": str(work / _SWITCH)}
        changes |= {"LD_PRELOAD": ":".join(libraries), **switches}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def wait_until(condition: object, seconds: float) -> bool:
    """Wait until a function returns true; return whether it did in time."""
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _command_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join([process.name(), *process.cmdline()])
    return ""  # It has ended.
