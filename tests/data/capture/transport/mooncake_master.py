"""A real Mooncake master on loopback, and a process that puts into its store."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import pytest

from data.capture.transport.mooncake_store import REQUIREMENT, MooncakeSettings
from tests.processes import free_ports

ROOT = Path(__file__).resolve().parents[4]
WORKER = Path(__file__).with_name("mooncake_worker.py")


class Master:
    """A master that can be killed and started again on the same ports."""

    def __init__(self, libraries: str, log: Path) -> None:
        self.port, self._metrics_port, self._http_port = free_ports(3)
        self.address = f"127.0.0.1:{self.port}"
        self.metadata = f"http://127.0.0.1:{self._http_port}/metadata"
        self._environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
        self._log = log
        self.start()

    def start(self) -> None:
        program = Path(sys.executable).with_name("mooncake_master")
        command = [
            str(program if program.exists() else shutil.which("mooncake_master")),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={self._metrics_port}",
            # The time after which memory that died with its process is no longer used.
            "--client_ttl=5",
            "--enable_http_metadata_server=true",
            "--http_metadata_server_host=127.0.0.1",
            f"--http_metadata_server_port={self._http_port}",
        ]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)
        while not (listens(self.port) and listens(self._http_port)):
            assert self._process.poll() is None, self._log.read_text()
            time.sleep(0.02)

    def kill(self) -> None:
        self._process.kill()
        assert self._process.wait() == -signal.SIGKILL, "the master had ended before"

    def settings(self, segment_bytes: int = 0) -> MooncakeSettings:
        return MooncakeSettings(master=self.address, segment_bytes=segment_bytes)


@contextmanager
def running_master(directory: Path) -> Iterator[Master]:
    if find_spec("mooncake") is None:
        pytest.skip(f"Mooncake is not installed: pip install '{REQUIREMENT}'")
    setup = subprocess.run([ROOT / "scripts" / "setup" / "mooncake"], capture_output=True, text=True)
    if setup.returncode != 0:
        pytest.skip(setup.stderr.strip())
    master = Master(setup.stdout.strip(), directory / "mooncake_master.log")
    try:
        yield master
    finally:
        master.kill()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def start_producer(settings: MooncakeSettings, num_samples: int, num_tokens: int) -> subprocess.Popen:
    """Start a process that puts samples of so many tokens."""
    return subprocess.Popen(
        [sys.executable, WORKER, json.dumps([asdict(settings), num_samples, num_tokens])],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
