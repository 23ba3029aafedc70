"""The process between a run and its vLLM server: it ends all processes of the server when the run ends.

`data/vllm/server_process.py` starts it by location as `supervisor.py PARENT COMMAND...`; it uses the standard
library only. It writes one JSON object per line to stdout: `{"server": PROCESS_ID}` first,
`{"answered": true}` after the server's first completion, and `{"ended": "signal 9"}` at the end. It ends the
server when its stdin has a `c` (close), when stdin ends, or when the parent has died.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

ANSWERED_FD = "EAGLE31_ANSWERED_FD"  # the server writes a byte there after its first completion
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_SECONDS = 0.1
# For vLLM to write what it has captured. Nobody waits for a server whose parent or API process died.
_CLOSE_SECONDS, _ORPHAN_SECONDS = 60.0, 3.0


class Supervisor:
    """The server's command while it runs."""

    def __init__(self, command: list[str]) -> None:
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
        report(ended=f"signal {-status}" if status < 0 else f"status {status}")

    def _wait(self, parent: int) -> float | None:
        """Wait a moment; return how many seconds the server has to end, or None if it is to run."""
        if os.getppid() != parent:
            return _ORPHAN_SECONDS
        for file in select.select(self._inputs, [], [], _POLL_SECONDS)[0]:
            content = os.read(file, 1)
            if file != self._answered:
                return _CLOSE_SECONDS if content == b"c" else _ORPHAN_SECONDS
            self._inputs.remove(file)
            if content:
                report(answered=True)
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
    Supervisor(sys.argv[2:]).run(int(sys.argv[1]))
    # Python would write to the closed stdout once more.
    os._exit(0)
