"""Jobs of Slurm: two nodes train as one does, save before the time limit, and are queued again."""

import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from data.embedded.target import EmbeddedTarget
from tests.processes import wait_for
from tests.runs.forked import ROOT
from tests.train.launch.slurm_cluster import Cluster, running_cluster
from tests.train.small_run import MAIN, RECIPE, STEPS, arguments, metrics_of, saved_steps, wait_for_step
from train.launch import slurm
from train.launch.slurm import Job, render

pytestmark = pytest.mark.full("it starts jobs under Slurm")
# A job starts four processes; on a busy machine each needs minutes.
ONE_NODE = Job(gpus_per_node=0, sbatch=["--cpus-per-task=1", "--comment=a 'b'"])


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


def test_a_job_that_is_near_its_time_limit_saves(
    cluster: Cluster,
    small_target: EmbeddedTarget,
    captured: Path,
    finished: tuple[Path, str],
    tmp_path: Path,
) -> None:
    """Two nodes train as one process does, up to the step at which they save."""
    directory = Path(shutil.copytree(captured, tmp_path / "run"))
    options = ["--nodes=2", "--gpus-per-node=0", "--cpus-per-task=1", "--time=30", "--save-seconds=100"]
    # A checkpoint before the end can come only from a request to stop.
    run = [*arguments(small_target, directory), "train.save_every=1000", "stages=[train]"]
    printed = cluster.call(sys.executable, "scripts/submit", *options, f"recipe={RECIPE}", *run)
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
    # Slurm holds it back for two minutes.
    cluster.wait(number, Restarts="1", JobState="PENDING")
    cluster.call("scancel", number)
    step = int(saved_steps(directory)[-1].removeprefix("step-"))
    records = metrics_of(directory)
    assert 3 <= records[-1]["step"] == step < STEPS
    for ours, theirs in zip(records, metrics_of(finished[0]), strict=False):
        assert (ours["kind"], ours["step"]) == (theirs["kind"], theirs["step"])
        for name in {"loss", "acceptance_length"} & ours.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name


def test_a_job_that_is_queued_again_starts_again_until_it_is_cancelled(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "import os, time; print('start', os.environ.get('SLURM_RESTART_COUNT'), flush=True); time.sleep(500)"
    )
    main = tmp_path / "checkout" / "train" / "main.py"
    main.parent.mkdir(parents=True)
    main.write_text(text)
    monkeypatch.setattr(slurm, "CHECKOUT", tmp_path / "checkout")
    (tmp_path / "slurm.sh").write_text(render(ONE_NODE, RECIPE, ["data.train=a b"], tmp_path, sys.executable))
    number = cluster.call("sbatch", "--parsable", str(tmp_path / "slurm.sh")).strip()
    log = tmp_path / f"slurm-{number}.out"
    wait_for(lambda: log.exists() and "start None" in log.read_text())
    assert " Comment=a 'b' " in cluster.call("scontrol", "--oneliner", "show", "job", number)
    cluster.call("scancel", "--batch", "--signal=USR1", number)
    cluster.wait(number, Restarts="1", JobState="PENDING")
    # Slurm would hold it back for two minutes. slurmd distinguishes a new credential from the revoked one by
    # the second in which it was made.
    cluster.call("scontrol", "update", f"JobId={number}", "StartTime=now+3")
    wait_for(lambda: "start 1" in log.read_text(), explain=log.read_text)
    cluster.call("scancel", number)
    assert cluster.wait(number, JobState="CANCELLED")["Restarts"] == "1"
    assert log.read_text().count("slurm: queued again") == 1
