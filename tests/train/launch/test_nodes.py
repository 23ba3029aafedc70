"""Two nodes of Slurm train as one does, save before the time limit, and resume when queued again."""

import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from data.embedded.target import EmbeddedTarget
from tests.runs.forked import ROOT
from tests.train.launch.slurm_cluster import Cluster, running_cluster, wait_for
from tests.train.small_run import MAIN, RECIPE, metrics_of, saved_steps, wait_for_step
from tests.train.small_run import arguments as tiny_arguments
from tests.train.torchrun import torchrun
from train.launch import slurm
from train.launch.slurm import Job, render

STEPS = 20
# A job starts six processes; on a busy machine each needs minutes.
pytestmark = pytest.mark.timeout(900)


def arguments(target: EmbeddedTarget, directory: Path) -> list[str]:
    """The training stage alone; a checkpoint before its end can come only from a request to stop."""
    own = [f"train.max_steps={STEPS}", "train.save_every=1000", "stages=[train]"]
    return [*tiny_arguments(target, directory), *own]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as running:
        yield running


def held_at(directory: Path, step: int) -> list[psutil.Process]:
    """Stop the run's two processes, without torchrun and srun above them, once it has come so far."""
    wait_for_step(directory, step)
    held = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if f"output_dir={directory}" in command and command[1:3] == ["-u", str(ROOT / MAIN)]:
            held.append(process)
    assert len(held) == 2, held
    for process in held:
        process.send_signal(signal.SIGSTOP)
    return held


def test_a_job_that_is_near_its_time_limit_saves_and_resumes(
    cluster: Cluster, small_target: EmbeddedTarget, captured: Path, tmp_path: Path
) -> None:
    once, directory = tmp_path / "once", tmp_path / "run"
    for made in (once, directory):
        shutil.copytree(captured, made)
    torchrun(MAIN, f"recipe={RECIPE}", *arguments(small_target, once), num_processes=2)
    options = ["--nodes=2", "--gpus-per-node=0", "--cpus-per-task=1", "--time=30", "--save-seconds=100"]
    run = [f"recipe={RECIPE}", *arguments(small_target, directory)]
    printed = cluster.call(sys.executable, "scripts/submit", *options, *run)
    number = printed.split()[1].rstrip(",")
    log = directory / f"slurm-{number}.out"
    held = held_at(directory, 3)
    # The signal that Slurm sends before the time limit.
    cluster.call("scancel", "--batch", "--signal=USR1", number)
    near = "the time limit is near"
    wait_for(
        lambda: log.read_text().partition(near)[2].count("Received 15 death signal") >= 2,
        explain=log.read_text,
    )
    for process in held:
        process.send_signal(signal.SIGCONT)
    cluster.wait(number, Restarts="1", JobState="PENDING")
    # Slurm would hold it back for two minutes. slurmd distinguishes a new credential from the revoked one by
    # the second in which it was made.
    cluster.call("scontrol", "update", f"JobId={number}", "StartTime=now+3")
    step = int(saved_steps(directory)[-1].removeprefix("step-"))
    assert 3 <= step < STEPS
    assert metrics_of(directory)[-1]["step"] == step
    facts = cluster.wait(number, JobState="COMPLETED")
    assert (facts["Restarts"], facts["ExitCode"]) == ("1", "0:0")
    assert f"resuming after step {step} of" in log.read_text()
    assert log.read_text().count("slurm: queued again") == 1
    assert metrics_of(directory) == metrics_of(once)


def start(
    cluster: Cluster, directory: Path, job: Job, stand_in: str, text: str, patch: pytest.MonkeyPatch
) -> tuple[str, Path]:
    """Submit a job whose checkout has a stand-in for a program; return its number and its log."""
    checkout = directory / "checkout"
    (checkout / stand_in).parent.mkdir(parents=True)
    (checkout / stand_in).write_text(text)
    patch.setattr(slurm, "CHECKOUT", checkout)
    (directory / "slurm.sh").write_text(render(job, RECIPE, ["data.train=a b"], directory, sys.executable))
    number = cluster.call("sbatch", "--parsable", str(directory / "slurm.sh")).strip()
    return number, directory / f"slurm-{number}.out"


@pytest.mark.parametrize(
    ("trainer", "state"), [("raise SystemExit(3)", "FAILED"), ("import time; time.sleep(100)", "CANCELLED")]
)
def test_a_job_that_fails_or_is_cancelled_does_not_queue_again(
    cluster: Cluster, tmp_path: Path, trainer: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, text = (
        Job(gpus_per_node=0, sbatch=["--cpus-per-task=1", "--comment=a 'b'"]),
        f"print('here', flush=True); {trainer}",
    )
    number, log = start(cluster, tmp_path, job, "train/main.py", text, monkeypatch)
    wait_for(lambda: log.exists() and "here" in log.read_text())
    if state == "CANCELLED":
        assert " Comment=a 'b' " in cluster.call("scontrol", "--oneliner", "show", "job", number)
        cluster.call("scancel", number)
    assert cluster.wait(number, JobState=state)["Restarts"] == "0"
    assert "queued again" not in log.read_text()


def test_a_job_ends_with_the_reason_why_a_server_did_not_start(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(nodes=2, target_nodes=1, gpus_per_node=0, sbatch=["--cpus-per-task=1"])
    text = "#!/usr/bin/env python3\nraise SystemExit('no memory for the key-value cache')\n"
    number, log = start(cluster, tmp_path, job, "scripts/serve_target", text, monkeypatch)
    cluster.wait(number, JobState="FAILED")
    assert f"the end of {tmp_path}/servers-{number}.log:" in log.read_text()
    assert "no memory for the key-value cache" in log.read_text()
