"""A run that a test has started ends with the test."""

import subprocess
import sys
from pathlib import Path

import psutil

from tests.processes import wait_for
from tests.runs.forked import ROOT

TEST = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.runs import forked
forked.CONTEXT.set_forkserver_preload([])
forked.start({script!r}, log=Path({log!r})).wait()
"""
RUN = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


def test_a_run_ends_with_a_test_that_is_killed(tmp_path: Path) -> None:
    script, log = tmp_path / "run.py", tmp_path / "log"
    script.write_text(RUN)
    program = TEST.format(root=str(ROOT), script=str(script), log=str(log))
    test = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_for(lambda: log.exists() and log.read_text().endswith("\n"))
    finally:
        test.kill()
        test.wait()
    run = int(log.read_text())
    if psutil.pid_exists(run):
        psutil.Process(run).wait(60)
