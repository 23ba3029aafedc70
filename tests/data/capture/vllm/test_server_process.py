"""The life of a server that a run starts, with a stand-in for vLLM."""

import socket
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from data.capture.vllm.server_process import ServerProcess
from eagle31.errors import UserError
from tests.data.capture.vllm.capturing import KEY, START_SECONDS
from tests.processes import wait_for

# It does what its argument says: ends, never listens, answers, and notes that it answered a greedy prompt, or
# is busy with others until its third prompt.
STUB = """
import http.server, json, pathlib, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/metrics":
            number = time.monotonic() if "busy" in sys.argv else 0
            self.wfile.write(f"vllm:steps {number}\\npython_gc {time.monotonic()}".encode())

    def do_POST(self):
        prompts.write(b".")
        if "busy" in sys.argv and prompts.tell() < 3:
            time.sleep(600)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body.get("temperature") == 0.0:
            pathlib.Path(__file__).with_name("greedy").touch()
        self.do_GET()

prompts = pathlib.Path(__file__).with_name("prompts").open("ab", buffering=0)
if "ends" in sys.argv:
    sys.exit("there is no such model")
if "sleeps" in sys.argv:
    time.sleep(600)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the run takes for the Python of vLLM's environment."""
    (tmp_path / "stub.py").write_text(STUB)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {tmp_path}/stub.py "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("EAGLE31_VLLM_PYTHON", str(python))


def start(tmp_path: Path, does: str, **changes: Any) -> ServerProcess:
    settings: dict[str, Any] = {"port": None, "limit_seconds": START_SECONDS, "stall_seconds": 3.0} | changes
    log = tmp_path / "logs" / "server.log"
    return ServerProcess([does], host="127.0.0.1", key=KEY, devices=None, log=log, **settings)


@pytest.mark.usefixtures("stub")
def test_a_server_that_dies_or_hangs_is_started_again_at_its_address(tmp_path: Path) -> None:
    with closing(start(tmp_path, "answers")) as server:
        for number, end in enumerate((psutil.Process.kill, psutil.Process.suspend), start=1):
            wait_for((tmp_path / "greedy").exists)  # one that was never ready is not started again
            [process] = psutil.Process(server.process_id).children()
            end(process)
            wait_for(lambda number=number: server.num_starts > number)
            (tmp_path / "greedy").unlink()  # which the next one answers once it is ready
        server.wait_until_ready(progress=False)
        server.check()


@pytest.mark.usefixtures("stub")
def test_a_server_that_computes_other_prompts_does_not_hang(tmp_path: Path) -> None:
    with closing(start(tmp_path, "busy", stall_seconds=1.0)) as server:
        wait_for((tmp_path / "greedy").exists)
        assert server.num_starts == 1


@pytest.mark.usefixtures("stub")
def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with closing(start(tmp_path, "ends")) as server:
        for _ in range(2):  # the reason is kept
            with pytest.raises(UserError, match=r"status 1 before it was ready:\n.*no such model"):
                server.wait_until_ready(progress=False)


@pytest.mark.usefixtures("stub")
def test_a_start_has_a_time_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.capture.vllm.server_process.FIRST_LINE_SECONDS", 0.0)
    server = start(tmp_path, "sleeps", limit_seconds=1.0)
    supervisor = psutil.Process(server.process_id)
    with pytest.raises(UserError, match=r"not ready within 1\.0 s"):
        server.wait_until_ready(progress=True)
    assert not supervisor.is_running()
    assert "vLLM: loading, 0 s of at most 1 s" in capsys.readouterr().err


@pytest.mark.usefixtures("stub")
def test_a_port_that_is_taken_is_refused_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"127\.0\.0\.1:{port}: A vLLM server cannot listen there"):
            start(tmp_path, "answers", port=port)
