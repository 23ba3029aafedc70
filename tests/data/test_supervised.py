"""A command that is run to its end, and ends early with the process that runs it."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from data.supervised import run_supervised

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("line", "status"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", -9), ("", 0)])
def test_the_status_and_the_output_are_the_commands(tmp_path: Path, line: str, status: int) -> None:
    program = f"import os, sys; print(os.getcwd(), sorted(os.environ)[-1], flush=True); {line}"
    command = [sys.executable, "-ISc", program]
    with (tmp_path / "log").open("wb") as log:
        assert run_supervised(command, environment={"ZZ": "1"}, directory=tmp_path, log=log) == status
    assert (tmp_path / "log").read_text() == f"{tmp_path} ZZ\n"


# It ignores the signal that asks it to end.
COMMAND = """
import json, os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
started = subprocess.Popen([sys.executable, "-ISc", "import time; time.sleep(600)"])
open("started", "w").write(json.dumps([os.getpid(), started.pid]) + "\\n")
time.sleep(600)
"""
RUN = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from data.supervised import run_supervised
os.mkfifo("started")
with open("log", "wb") as log:
    command = [sys.executable, "-ISc", sys.argv[2]]
    run_supervised(command, environment=dict(os.environ), directory=Path.cwd(), log=log)
"""


def test_all_processes_end_with_the_one_that_runs_them(tmp_path: Path) -> None:
    run = subprocess.Popen([sys.executable, "-ISc", RUN, str(ROOT), COMMAND], cwd=tmp_path)
    while not (tmp_path / "started").exists():
        assert run.poll() is None
    with (tmp_path / "started").open() as file:
        processes = [psutil.Process(process_id) for process_id in json.loads(file.readline())]
    run.kill()
    run.wait()
    psutil.wait_procs(processes)
