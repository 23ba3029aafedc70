"""The process between a run and its vLLM server: it ends all processes of the server when the run ends.

`data/vllm/server_process.py` starts it by location, with the standard library only:
`supervisor.py PARENT ADDRESS START_SECONDS STALL_SECONDS COMMAND...`. It writes one JSON object per line to
stdout: `{"server": PROCESS_ID}` first, `{"answered": true}` after the server's first completion, and
`{"ended": "with signal 9", "status": -9}` at the end. It ends the server when its stdin has a `c` (close),
when stdin ends, when the parent has died, or when the server hangs. `supervised.py` gives an empty ADDRESS:
the command is then no server.
"""

import contextlib
import ctypes
import http.client
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

ANSWERED_FD = "EAGLE31_ANSWERED_FD"  # the server writes a byte there after its first completion
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_SECONDS = 0.1
# For vLLM to write what it has captured. Nobody waits for a server whose parent or API process died.
_CLOSE_SECONDS, _ORPHAN_SECONDS = 60.0, 3.0
_WATCH_SECONDS, _REQUEST_SECONDS = 5.0, 10.0
_START_WATCH_SECONDS = 1.0  # a server that hangs at once is not to be taken for one that loads


class Pulse:
    """The signs of progress of a server, in a thread: vLLM's counters change, or it answers a prompt.

    A prompt of one token is sent after half of `stall_seconds` without another sign. A server without work
    answers it at once, and the counters of one that works change.

    Args:
        address: HOST:PORT.
        start_seconds: the longest time until the server is ready, which its first answer shows.
        stall_seconds: the longest time without progress after that.
    """

    def __init__(self, address: str, start_seconds: float, stall_seconds: float) -> None:
        self.hung: str | None = None  # how the server hangs
        self.has_answered = False
        self._address, self._start_seconds, self._stall_seconds = address, start_seconds, stall_seconds
        self._progressed = time.monotonic()
        key = os.environ.get("VLLM_API_KEY")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while self._request("GET", "/health", _REQUEST_SECONDS) is None and not self.has_answered:
            if self._without_progress(self._start_seconds, "it was not ready within"):
                return
            time.sleep(_START_WATCH_SECONDS)
        self._progressed = time.monotonic()
        counters: list[bytes] = []
        probe: threading.Thread | None = None
        while not self._without_progress(self._stall_seconds, "it made no progress for"):
            time.sleep(min(_WATCH_SECONDS, self._stall_seconds / 8))
            metrics = self._request("GET", "/metrics", min(_REQUEST_SECONDS, self._stall_seconds / 4)) or b""
            found = [line for line in metrics.splitlines() if line.startswith(b"vllm:") and _is_counter(line)]
            if found and found != counters:
                counters, self._progressed = found, time.monotonic()
            silent = time.monotonic() - self._progressed > self._stall_seconds / 2
            if silent and (probe is None or not probe.is_alive()):
                probe = threading.Thread(target=self._probe, daemon=True)
                probe.start()

    def _without_progress(self, limit: float, what: str) -> bool:
        if time.monotonic() - self._progressed > limit:
            self.hung = f"{what} {limit:.0f} s"
        return self.hung is not None

    def _probe(self) -> None:
        models = self._request("GET", "/v1/models", self._stall_seconds)
        if models is not None:
            body = {"model": json.loads(models)["data"][0]["id"], "prompt": [0], "max_tokens": 1}
            if self._request("POST", "/v1/completions", self._stall_seconds, body) is not None:
                self._progressed = time.monotonic()

    def _request(
        self, method: str, path: str, seconds: float, body: dict[str, Any] | None = None
    ) -> bytes | None:
        """Return the answer's content, or None where there is none or it is an error."""
        connection = http.client.HTTPConnection(self._address, timeout=seconds)
        content = None if body is None else json.dumps(body)
        try:
            headers = self._headers | {"Content-Type": "application/json"}
            connection.request(method, path, content, headers)
            answer = connection.getresponse()
            found = answer.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        return found if answer.status == 200 else None


def _is_counter(line: bytes) -> bool:
    return b"_total" in line or b"_count" in line


class Supervisor:
    """The server's command while it runs. Without a pulse it may take as long as it likes."""

    def __init__(self, command: list[str], pulse: Pulse | None) -> None:
        self._pulse = pulse
        prctl = ctypes.CDLL(None).prctl
        # Processes of vLLM whose parent dies become children of this process, which ends them.
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._answered, answered = os.pipe()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            env=os.environ | {ANSWERED_FD: str(answered)},
            pass_fds=[answered],
            preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        os.close(answered)
        self.server = process.pid
        self.status: int | None = None  # the server's, once it has ended
        self._inputs = [sys.stdin.fileno(), self._answered]
        report(server=self.server)

    def run(self, parent: int) -> None:
        """Return once no process of the server exists."""
        seconds = None
        while seconds is None and self.status is None:
            seconds = self._wait(parent)
            self._reap()
        self._end(_ORPHAN_SECONDS if seconds is None else seconds)
        status = self.status or 0
        how = f"with signal {-status}" if status < 0 else f"with status {status}"
        report(ended=how if self._hung is None else f"because {self._hung}", status=status)

    @property
    def _hung(self) -> str | None:
        return None if self._pulse is None else self._pulse.hung

    def _wait(self, parent: int) -> float | None:
        """Wait a moment; return how many seconds the server has to end, or None if it is to run."""
        if os.getppid() != parent or self._hung is not None:
            return _ORPHAN_SECONDS
        for file in select.select(self._inputs, [], [], _POLL_SECONDS)[0]:
            content = os.read(file, 1)
            if file != self._answered:
                return _CLOSE_SECONDS if content == b"c" else _ORPHAN_SECONDS
            self._inputs.remove(file)
            if content:
                report(answered=True)
                if self._pulse is not None:
                    self._pulse.has_answered = True
        return None

    def _end(self, seconds: float) -> None:
        """End all processes of the server, by force after `seconds`."""
        deadline = time.monotonic() + seconds
        sent = {self.server} if self.status is None else set(descendants(os.getpid()))
        signal_all(sent, signal.SIGTERM)  # vLLM's API process ends the others
        while self._reap():
            if self.status is not None and (orphans := set(descendants(os.getpid())) - sent):
                sent |= orphans
                signal_all(orphans, signal.SIGTERM)
            if time.monotonic() > deadline:
                signal_all(set(descendants(os.getpid())), signal.SIGKILL)
            time.sleep(_POLL_SECONDS / 5)

    def _reap(self) -> bool:
        """Collect the processes that have ended; return whether others are left."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if ended[0] == self.server:
                    self.status = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:
            return False
        return True


def descendants(process: int) -> Iterator[int]:
    """Yield the processes below one."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # It has ended meanwhile.
    below = {process}
    while found := {child for child, parent in parents.items() if parent in below} - below:
        yield from found
        below |= found


def signal_all(processes: set[int], number: signal.Signals) -> None:
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def report(**content: object) -> None:
    with contextlib.suppress(BrokenPipeError):  # The parent may have died.
        print(json.dumps(content), flush=True)


if __name__ == "__main__":
    parent, address, start_seconds, stall_seconds, *command = sys.argv[1:]
    watched = Pulse(address, float(start_seconds), float(stall_seconds)) if address else None
    Supervisor(command, watched).run(int(parent))
    # Python would write to the closed stdout once more.
    os._exit(0)
