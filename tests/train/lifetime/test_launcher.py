"""torchrun is killed, and its processes end."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.train.small_run import MAIN, RUN_VARIABLE, processes_of
from tests.train.torchrun import ROOT, environment, preloaded_python, torchrun_command

END_SECONDS = 5.0


def wait_for_worker(directory: Path) -> psutil.Process:
    """Return the run's process, once it has imported what comes after its first lines."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for process in processes_of(directory):
            with contextlib.suppress(OSError):
                if "libtorch" in Path(f"/proc/{process.pid}/maps").read_text():
                    return process
        time.sleep(0.1)
    raise AssertionError("no process was started")


def test_a_run_ends_with_the_torchrun_that_is_killed(tmp_path: Path) -> None:
    """Its process is a real one: a fork of `preloaded_python` would have another parent."""
    command = torchrun_command(MAIN, "recipe=quickstart", f"output_dir={tmp_path}")
    client = subprocess.Popen(
        [preloaded_python(), *command[1:]],
        cwd=ROOT,
        env=environment() | {"PYTHON_EXEC": sys.executable, RUN_VARIABLE: str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        worker = wait_for_worker(tmp_path)
        launcher = worker.parent()
        assert launcher is not None
        launcher.kill()
        _, alive = psutil.wait_procs([worker], END_SECONDS)
        assert not alive
    finally:
        for process in [client, *processes_of(tmp_path)]:
            process.kill()
        client.wait()


def test_a_run_outlives_the_shell_that_started_it(tmp_path: Path) -> None:
    """Without torchrun no parent matters."""
    program = "import sys, time; sys.path.insert(0, sys.argv[1])\n"
    program += "from train.lifetime.launcher import end_with_launcher\n"
    program += "end_with_launcher(); print('here', flush=True); time.sleep(60)"
    shell = subprocess.Popen(
        ["bash", "-c", '"$0" -ISc "$1" "$2" & echo $!; wait', sys.executable, program, str(ROOT)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert shell.stdout is not None
    lines = {shell.stdout.readline().strip() for _ in range(2)}
    assert "here" in lines
    [number] = lines - {"here"}
    run = psutil.Process(int(number))
    shell.kill()
    shell.wait()
    time.sleep(0.3)
    assert run.is_running()
    run.kill()
