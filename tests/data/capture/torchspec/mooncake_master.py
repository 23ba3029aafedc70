"""A real Mooncake master on loopback, and samples that are put into its store as TorchSpec's engines do."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from data.capture.torchspec.mooncake import REQUIREMENT, MooncakeSettings
from data.capture.torchspec.transport import SUFFIXES, TorchSpecTransport
from data.capture.transport.protocol import StateRequest
from tests.processes import free_ports

ROOT = Path(__file__).resolve().parents[4]
NUM_AUX_LAYERS, HIDDEN_SIZE = 3, 64


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
        return MooncakeSettings(self.address, "P2PHANDSHAKE", segment_bytes)


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


def sample(index: int, num_tokens: int) -> tuple[StateRequest, Tensor, Tensor]:
    """Return a request, and its states as TorchSpec's engines send them."""
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(1000, (num_tokens,), generator=generator)
    aux = torch.randn(num_tokens, NUM_AUX_LAYERS, HIDDEN_SIZE, generator=generator).bfloat16()
    last = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator).bfloat16()
    return StateRequest(f"run-{index}", ids, torch.ones(num_tokens, dtype=torch.bool)), aux, last


def open_transport(settings: MooncakeSettings, norm_scale: Tensor | None = None) -> TorchSpecTransport:
    return TorchSpecTransport(
        settings, num_aux_layers=NUM_AUX_LAYERS, hidden_size=HIDDEN_SIZE, norm_scale=norm_scale
    )


def put(transport: TorchSpecTransport, chosen: str, *tensors: Tensor) -> None:
    """Put aux states, token ids and final states under a key, by the client of the transport itself."""
    contents = [tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors]
    parts = transport._parts([len(content) for content in contents])
    for part, content in zip(parts, contents, strict=True):
        part.copy_(content)
    keys, pointers = [chosen + suffix for suffix in SUFFIXES], [part.data_ptr() for part in parts]
    assert not any(transport._store.batch_put_from(keys, pointers, [len(part) for part in parts]))
