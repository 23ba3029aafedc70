"""Runs that stop before they are finished: by a signal to one rank, by the time limit, and with torchrun."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from data.embedded.target import EmbeddedTarget
from eagle31.json_files import read_json
from tests.runs.forked import ROOT, environment, start
from tests.train.small_run import MAIN, RECIPE, STEPS, arguments, metrics_of, saved_steps, wait_for_step
from tests.train.torchrun import torchrun, torchrun_command
from train.command import INTERRUPTED
from train.pipeline import LOCK_FILE
from train.stop import STOPPED, STOPPED_FILE, stop_reasons, time_limit


def test_a_signal_to_one_rank_saves_on_all(
    small_target: EmbeddedTarget, captured: Path, tmp_path: Path
) -> None:
    stopped = tmp_path / "stopped"
    shutil.copytree(captured, stopped)
    command = [MAIN, f"recipe={RECIPE}", *arguments(small_target, stopped), "stages=[train]"]
    ranks = start(*command, log=tmp_path / "log", num_processes=2)
    wait_for_step(stopped, 3)
    pid = ranks.processes[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    assert ranks.wait() == STOPPED, ranks.printed()
    assert "the same command resumes" in ranks.printed()
    step = read_json(stopped / STOPPED_FILE)["step"]
    assert saved_steps(stopped) == [f"step-{step:08d}"]
    assert 3 <= metrics_of(stopped)[-1]["step"] == step < STEPS


def test_the_time_limit_saves_after_a_step_and_the_same_command_resumes(
    small_target: EmbeddedTarget, captured: Path, finished: tuple[Path, str], tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(captured, directory)
    command = [MAIN, f"recipe={RECIPE}", *arguments(small_target, directory), "stages=[train]"]
    ranks = start(*command, "stop_after_minutes=1e-6", log=tmp_path / "log", torchrun=False)
    assert ranks.wait() == STOPPED, ranks.printed()
    assert read_json(directory / STOPPED_FILE) == {"reason": "the time limit", "step": 1}
    assert "resuming after step 1 of" in torchrun(*command)
    assert not (directory / STOPPED_FILE).exists()
    assert metrics_of(directory) == metrics_of(finished[0])


def test_a_signal_outside_of_training_ends_a_run_at_once(
    small_target: EmbeddedTarget, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    settings = [*arguments(small_target, directory), "stages=[data,vocab,answers,capture]"]
    ranks = start(MAIN, f"recipe={RECIPE}", *settings, log=tmp_path / "log")
    while not (directory / LOCK_FILE).exists():
        assert ranks.processes[0].is_alive(), ranks.printed()
        time.sleep(0.01)
    ranks.send_signal(signal.SIGINT)
    assert ranks.wait() == INTERRUPTED
    assert "the same command resumes" in ranks.printed()
    assert not (directory / STOPPED_FILE).exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_every_signal_waits_for_the_step_in_training(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_reasons(None) as reason:
        os.kill(os.getpid(), number)
        assert reason() == number.name
    assert signal.getsignal(number) is before


def test_a_slurm_job_stops_before_its_end() -> None:
    assert time_limit(None, {}, 1000.0) is None
    assert time_limit(None, {"SLURM_JOB_END_TIME": "4600"}, 1000.0) == 4600 - 120
    assert time_limit(None, {"SLURM_JOB_END_TIME": "1100"}, 1000.0) == 1090
    assert time_limit(None, {"SLURM_JOB_END_TIME": "900"}, 1000.0) == 900
    assert time_limit(None, {"SLURM_JOB_END_TIME": "Unknown"}, 1000.0) is None
    assert time_limit(5, {"SLURM_JOB_END_TIME": "1100"}, 1000.0) == 1300


PROGRAM = """
import os, sys, time
sys.path.insert(0, {root!r})
from train.command import prepare
prepare()
with open({file!r}, "w") as file:
    print(os.getpid(), file=file)
time.sleep(600)
"""


def test_the_processes_of_a_torchrun_that_is_killed_end(tmp_path: Path) -> None:
    file = tmp_path / "process"
    (tmp_path / "program.py").write_text(PROGRAM.format(root=str(ROOT), file=str(file)))
    launcher = subprocess.Popen(torchrun_command(str(tmp_path / "program.py")), env=environment())
    try:
        while not file.exists() or not file.read_text().endswith("\n"):
            assert launcher.poll() is None
            time.sleep(0.05)
        process = psutil.Process(int(file.read_text()))
    finally:
        launcher.kill()
        launcher.wait()
    process.wait()
