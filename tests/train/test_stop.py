"""Runs that stop before they are finished: by a signal, by the time limit, and with torchrun."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from unittest.mock import MagicMock, Mock

import psutil
import pytest

from data.embedded.target import EmbeddedTarget
from eagle31.json_files import read_json
from tests.runs.forked import ROOT, environment, start
from tests.train.small_run import MAIN, RECIPE, arguments, metrics_of
from tests.train.torchrun import torchrun, torchrun_command
from train.config.compose import composed
from train.context import RunContext
from train.distributed import World
from train.stages import train
from train.stages.train import run_train
from train.stop import STOPPED, STOPPED_FILE, Stopped, stop_reasons, time_limit


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


def test_a_stop_is_noted_before_anything_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B may wait for its server until Slurm kills the job, which is queued again where the file is."""
    found = []
    tracker = MagicMock()
    tracker.__exit__.side_effect = lambda *_: found.append((tmp_path / STOPPED_FILE).exists())
    stops = Mock(side_effect=Stopped(3, "SIGTERM"))
    replaced = {name: MagicMock() for name in ("open_store", "opened_source")}
    training = Mock(return_value=Mock(tracker=tracker))
    for name, value in (replaced | {"built": training, "train_loop": stops}).items():
        monkeypatch.setattr(train, name, value)
    config = composed(["recipe=quickstart", f"output_dir={tmp_path}"])
    context = RunContext(config, World(0, 0, 1), artifacts=MagicMock())
    with pytest.raises(Stopped):
        run_train(context, tmp_path)
    assert found == [True]


def test_a_signal_waits_for_the_step_in_training() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_reasons(None) as reason:
        os.kill(os.getpid(), signal.SIGTERM)
        assert reason() == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before


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
