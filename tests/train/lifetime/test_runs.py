"""Runs under torchrun with a rank that hangs or is signalled, and a run that is stopped before training."""

import contextlib
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from data.embedded.target import EmbeddedTarget
from eagle31.json_files import read_json
from tests.processes import environment_of
from tests.train.small_run import (
    MAIN,
    RECIPE,
    RUN_VARIABLE,
    arguments,
    metrics_of,
    processes_of,
    saved_steps,
    wait_for_step,
)
from tests.train.torchrun import ROOT, environment, preloaded_python, program_of, run_here, torchrun_command
from train.lifetime.stops import STOPPED, STOPPED_FILE

pytestmark = pytest.mark.timeout(600)


def start(command: list[str], directory: Path) -> subprocess.Popen[bytes]:
    """Start a run that writes to the file `printed` next to its directory."""
    python = preloaded_python()
    own = {"PYTHON_EXEC": python, RUN_VARIABLE: str(directory)}
    with directory.with_name("printed").open("w") as file:
        return subprocess.Popen(
            [python, *command], cwd=ROOT, env=environment() | own, stdout=file, stderr=subprocess.STDOUT
        )


def program_of_rank(directory: Path, rank: int) -> psutil.Process:
    [client] = [one for one in processes_of(directory) if environment_of(one).get("RANK") == str(rank)]
    return program_of(client)


def ended(process: subprocess.Popen[bytes], directory: Path) -> tuple[int, str]:
    """Return the exit status and what was printed; no process is left."""
    status = process.wait(timeout=240)
    deadline = time.monotonic() + 30
    while processes_of(directory):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return status, directory.with_name("printed").read_text()


def test_a_stopped_rank_is_named_and_a_signal_to_one_rank_saves_on_all(
    small_target: EmbeddedTarget, captured: Path, tmp_path: Path
) -> None:
    """Two runs: while the first one waits for its time limit, the second one trains."""

    def start_training(directory: Path, *settings: str) -> subprocess.Popen[bytes]:
        shutil.copytree(captured, directory)
        run = [f"recipe={RECIPE}", *arguments(small_target, directory), "stages=[train]", *settings]
        run += [f"train.{name}=5000" for name in ("max_steps", "save_every", "validate_every")]
        started = start(torchrun_command(MAIN, *run, num_processes=2)[1:], directory)
        wait_for_step(directory, 3)
        return started

    hung, signalled = tmp_path / "first" / "run", tmp_path / "second" / "run"
    hanging = start_training(hung, "deepspeed.timeout_minutes=0.2")
    time.sleep(2.0)  # several beats, so that the others know the rank's step
    ranks = [program_of_rank(hung, rank) for rank in range(2)]
    ranks[1].send_signal(signal.SIGSTOP)

    stopping = start_training(signalled)
    program_of_rank(signalled, 1).send_signal(signal.SIGUSR1)
    status, printed = ended(stopping, signalled)
    assert status == 1  # torchrun's, whatever that of its processes is
    stopped = read_json(signalled / STOPPED_FILE)
    assert stopped["stage"] == "train"
    assert stopped["reason"].startswith("SIGUSR1")
    assert saved_steps(signalled) == [f"step-{stopped['step']:08d}"]
    assert metrics_of(signalled)[-1]["step"] == stopped["step"] < 5000
    assert "the same command resumes" in printed
    assert f"exitcode  : {STOPPED} " in printed

    ranks[0].wait(timeout=120)
    # torchrun would kill the other one after 30 s. It continues too late, and ends.
    with contextlib.suppress(psutil.NoSuchProcess):
        ranks[1].send_signal(signal.SIGCONT)
    status, printed = ended(hanging, hung)
    assert status == 1
    assert "error: Rank 1 (process " in printed
    assert ", which is stopped) has not answered for " in printed
    assert "in stage train, step " in printed
    assert "deepspeed.timeout_minutes=0.2: Rank 1" in printed  # in torchrun's table
    assert (hung / "hung" / "rank-0.txt").is_file()
    assert not (hung / STOPPED_FILE).exists()
    assert saved_steps(hung) == []


def test_a_run_that_is_stopped_before_training_resumes(small_target: EmbeddedTarget, tmp_path: Path) -> None:
    """Without torchrun, whose exit status says nothing."""
    directory = tmp_path / "run"
    run = [f"recipe={RECIPE}", *arguments(small_target, directory), "stages=[data,vocab,answers,capture]"]
    process = start([MAIN, *run, "stop_after_minutes=1e-3"], directory)
    status, printed = ended(process, directory)
    assert status == STOPPED, printed
    assert read_json(directory / STOPPED_FILE)["reason"] == "the time limit"
    assert "stop: the time limit; a second signal ends the run at once" in printed
    assert not list(directory.glob("artifacts/capture-*/stage.json"))
    run_here(run[0].removeprefix("recipe="), *run[1:])
    assert not (directory / STOPPED_FILE).exists()
    assert list((directory / "artifacts").glob("capture-*/stage.json"))
