"""Running a command to its end, whose processes all end with this process."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from data.processes.parent import end_group

SUPERVISOR = Path(__file__).with_name("supervisor.py")


def run_supervised(
    command: Sequence[str | Path], *, environment: Mapping[str, str], directory: Path, log: IO[bytes]
) -> int:
    """Run a command and return its exit status, the negative number of a signal that ended it.

    However this process ends, the command and the processes that it has started end within seconds.

    Args:
        environment: all of the command's environment variables.
        directory: its working directory.
        log: gets its stdout and stderr.
    """
    supervisor = [sys.executable, "-I", "-S", str(SUPERVISOR), str(os.getpid()), "", "0", "0"]
    process = subprocess.Popen(
        [*supervisor, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
        cwd=directory,
        # Signals to this process's group are for this process to handle.
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    status: int | None = None
    try:
        for line in process.stdout:
            status = json.loads(line).get("status", status)
    finally:
        process.stdin.close()  # ends what still runs where this process is interrupted
        process.wait()
        process.stdout.close()
    if status is None:  # Somebody killed the supervisor. What it would have ended is in its group.
        end_group(process.pid)
        return -signal.SIGKILL
    return status
