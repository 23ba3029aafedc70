"""A Ray node on this machine, in TorchSpec's environment, that reports a GPU."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.data.transport.mooncake_master import free_ports, listens

# This replaces CUDA in all processes of the node.
ON_CPU = Path(__file__).with_name("on_cpu")
_START_SECONDS, _STOP_SECONDS = 90, 5


@contextmanager
def running_node(python: str, directory: Path, libraries: str) -> Iterator[str]:
    """Run the node and yield its address."""
    (port,) = free_ports(1)
    command = [
        str(Path(python).with_name("ray")),
        *("start", "--head", "--block", "--num-gpus=1", "--num-cpus=2", "--include-dashboard=false"),
        *(f"--port={port}", "--node-ip-address=127.0.0.1", "--object-store-memory=80000000"),
        *(f"--temp-dir={directory}", "--disable-usage-stats"),
    ]
    own = {
        "PYTHONPATH": str(ON_CPU),
        "LD_LIBRARY_PATH": libraries,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log = directory / "ray.log"
    with log.open("w") as output:
        node = subprocess.Popen(
            command, env={**os.environ, **own}, stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + _START_SECONDS
        while "Ray runtime started" not in log.read_text():
            assert node.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        assert listens(port)
        yield f"127.0.0.1:{port}"
    finally:
        os.killpg(node.pid, signal.SIGTERM)
        try:
            node.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(node.pid, signal.SIGKILL)
            node.wait()
