"""The supervisor of a server, with programs in place of one."""

import json
import os
import subprocess
import sys

import pytest

from data.processes import supervisor

NO_SERVER = "127.0.0.1:9"  # the discard port: nothing answers there
ANSWERS_ONCE = f"""
import os, time
os.write(int(os.environ["{supervisor.ANSWERED_FD}"]), b"a")
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("program", "start_seconds", "how"),
    [
        (ANSWERS_ONCE, 600, "because it made no progress for 1 s"),
        ("import time; time.sleep(60)", 1, "because it was not ready within 1 s"),
    ],
    ids=["after_its_first_answer", "before_it_is_ready"],
)
def test_a_server_that_hangs_is_ended(program: str, start_seconds: int, how: str) -> None:
    """A server that hangs at its first answer has been ready, whether or not its health was seen."""
    arguments = [str(os.getpid()), NO_SERVER, str(start_seconds), "1", sys.executable, "-S", "-c", program]
    command = [sys.executable, "-I", "-S", supervisor.__file__, *arguments]
    # Its stdin stays open: at the end of it, the supervisor would end the server.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        *_, last = map(json.loads, started.stdout)
    assert last["ended"] == how
