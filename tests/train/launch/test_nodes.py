"""Several nodes: with and without Slurm they train as one does. About 50 s on two quiet cores."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from data.embedded.target import EmbeddedTarget
from eagle31.json_files import read_json
from tests.train.launch.slurm_cluster import Cluster, free_ports, running_cluster, wait_for
from tests.train.small_run import MAIN, RECIPE, metrics_of, saved_steps, wait_for_step
from tests.train.small_run import arguments as tiny_arguments
from tests.train.torchrun import ROOT, environment, preloaded_python, program_of, torchrun
from train.config.launcher import LauncherConfig
from train.launch.slurm import Submission, render
from train.stop import STOPPED_FILE

STEPS = 20
# A job starts six processes; on a busy machine each needs minutes.
pytestmark = pytest.mark.timeout(900)


def arguments(target: EmbeddedTarget, directory: Path) -> list[str]:
    """The training stage alone; a checkpoint before its end can come only from a request to stop."""
    own = [f"train.max_steps={STEPS}", "train.save_every=1000", "stages=[train]"]
    return [*tiny_arguments(target, directory), *own]


@pytest.fixture(scope="module")
def one_node(
    small_target: EmbeddedTarget, captured: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict]:
    """The training curve of two processes on one node."""
    directory = tmp_path_factory.mktemp("one_node") / "run"
    shutil.copytree(captured, directory)
    torchrun(MAIN, f"recipe={RECIPE}", *arguments(small_target, directory), num_processes=2)
    return metrics_of(directory)


@pytest.mark.full("a job of Slurm starts torchrun in the same way")
def test_two_nodes_without_slurm(
    small_target: EmbeddedTarget, captured: Path, one_node: list[dict], tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(captured, directory)
    [port] = free_ports(1)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=nodes"]
    command += [MAIN, f"recipe={RECIPE}", *arguments(small_target, directory)]
    nodes = [
        subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    for node in nodes:
        printed, _ = node.communicate(timeout=240)
        assert node.returncode == 0, printed
    assert metrics_of(directory) == one_node


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Jobs start a real torchrun, whose ranks are forks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHON_EXEC", preloaded_python())
        with running_cluster() as running:
            yield running


@dataclass
class Job:
    """A job that trains on two nodes."""

    cluster: Cluster
    number: str
    directory: Path  # of its run

    @property
    def log(self) -> Path:
        return self.directory / f"slurm-{self.number}.out"

    def wait(self, **expected: str) -> dict[str, str]:
        return self.cluster.wait(self.number, **expected)

    def update(self, *fields: str) -> None:
        self.cluster.call("scontrol", "update", f"JobId={self.number}", *fields)


Submit = Callable[..., Job]


@pytest.fixture
def submit(cluster: Cluster, small_target: EmbeddedTarget, captured: Path, tmp_path: Path) -> Submit:
    """Submits the training of a run that has its states, with further settings."""

    def submitted(*settings: str) -> Job:
        directory = tmp_path / "run"
        shutil.copytree(captured, directory)
        launcher = ["launcher=slurm", "launcher.nodes=2", "launcher.gpus_per_node=0"]
        launcher += ["launcher.cpus_per_task=1", "launcher.time=30", "launcher.signal_seconds=100"]
        command = [*launcher, *arguments(small_target, directory), *settings]
        printed = cluster.call(sys.executable, "scripts/submit", f"recipe={RECIPE}", *command)
        return Job(cluster, printed.split()[1].rstrip(","), directory)

    return submitted


def workers(directory: Path) -> list[psutil.Process]:
    """The run's two processes, without torchrun and srun above them."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if f"output_dir={directory}" in command and command[3:5] == ["-u", str(ROOT / MAIN)]:
            found.append(program_of(process))
    assert len(found) == 2, found
    return found


def hold_at(directory: Path, step: int) -> list[psutil.Process]:
    """Stops the run's processes once it has come so far."""
    wait_for_step(directory, step)
    held = workers(directory)
    for process in held:
        process.send_signal(signal.SIGSTOP)
    return held


def release(held: Sequence[psutil.Process]) -> None:
    for process in held:
        process.send_signal(signal.SIGCONT)


def release_at_time_limit(job: Job, held: Sequence[psutil.Process]) -> None:
    """Let held processes continue once torchrun has, near the time limit, a signal to end on both nodes."""

    def is_signalled() -> bool:
        after = job.log.read_text().partition("the time limit is near")[2]
        return after.count("Received 15 death signal") >= 2

    wait_for(is_signalled, explain=job.log.read_text)
    release(held)


def start_again(job: Job, restarts: int) -> None:
    """Start a requeued job, which Slurm would hold back for two minutes by default.

    The start has to be some seconds later: slurmd distinguishes a new credential from the revoked one by the
    second in which it was made.
    """
    job.wait(Restarts=str(restarts), JobState="PENDING")
    job.update("TimeLimit=30", "StartTime=now+3")
    job.wait(JobState="RUNNING")


def stopped_at(directory: Path) -> int:
    """The step of the newest checkpoint, after which nothing was trained."""
    step = int(saved_steps(directory)[-1].removeprefix("step-"))
    assert metrics_of(directory)[-1]["step"] == step
    return step


def test_a_job_that_is_near_its_time_limit_saves_and_resumes(submit: Submit, one_node: list[dict]) -> None:
    job = submit()
    held = hold_at(job.directory, 3)
    # The signal that Slurm sends before the time limit.
    job.cluster.call("scancel", "--batch", "--signal=USR1", job.number)
    release_at_time_limit(job, held)
    start_again(job, 1)
    step = stopped_at(job.directory)
    assert 3 <= step < STEPS
    facts = job.wait(JobState="COMPLETED")
    assert (facts["Restarts"], facts["ExitCode"]) == ("1", "0:0")
    printed = job.log.read_text()
    assert f"resuming after step {step} of" in printed
    assert printed.count("queued again") == 1
    assert metrics_of(job.directory) == one_node


@pytest.mark.full("Slurm looks at time limits every 30 s only")
def test_slurm_requeues_a_job_and_sends_the_signal_before_its_time_limit(
    submit: Submit, one_node: list[dict]
) -> None:
    job = submit()
    held = hold_at(job.directory, 3)
    job.cluster.call("scontrol", "requeue", job.number)
    release(held)  # Slurm lets the job's stopped processes continue, which forks of another one are not
    start_again(job, 1)
    first = stopped_at(job.directory)
    assert 3 <= first < STEPS - 8

    held = hold_at(job.directory, first + 3)
    job.update("TimeLimit=2")  # from now on the signal is due
    release_at_time_limit(job, held)
    start_again(job, 2)
    assert first + 3 <= stopped_at(job.directory) < STEPS
    job.wait(JobState="COMPLETED", Restarts="2")
    assert job.log.read_text().count("queued again") == 1
    assert metrics_of(job.directory) == one_node


@pytest.mark.full("the shortest job of Slurm takes a minute")
def test_a_job_stops_before_its_end_though_no_signal_comes(submit: Submit) -> None:
    ignored = "launcher.sbatch=['--signal=B:URG@1']"  # by a shell
    job = submit("train.max_steps=100000", "launcher.time=1", "launcher.signal_seconds=1", ignored)
    job.wait(Restarts="1", JobState="PENDING")
    assert read_json(job.directory / STOPPED_FILE)["reason"] == "the time limit"
    assert "slurm: queued again" in job.log.read_text()
    assert "the time limit is near" not in job.log.read_text()
    job.cluster.call("scancel", job.number)


# Stand-ins where it is the batch script that is looked at.
FAILING_SERVER = "#!/usr/bin/env python3\nraise SystemExit('no memory for the key-value cache')\n"


def start(
    cluster: Cluster, directory: Path, launcher: LauncherConfig, stand_ins: dict[str, str]
) -> tuple[str, Path]:
    """Submit a job of a checkout that holds stand-ins; return its number and its log."""
    checkout = directory / "checkout"
    for name, text in stand_ins.items():
        (checkout / name).parent.mkdir(parents=True)
        (checkout / name).write_text(text)
    submission = Submission(["data.train=a b"], RECIPE, directory, sys.executable, checkout)
    (directory / "slurm.sh").write_text(render(submission, launcher))
    job = cluster.call("sbatch", "--parsable", str(directory / "slurm.sh")).strip()
    return job, directory / f"slurm-{job}.out"


@pytest.mark.parametrize(
    ("trainer", "state"), [("raise SystemExit(3)", "FAILED"), ("import time; time.sleep(100)", "CANCELLED")]
)
def test_a_job_that_fails_or_is_cancelled_does_not_queue_again(
    cluster: Cluster, tmp_path: Path, trainer: str, state: str
) -> None:
    stand_in = f"print('here', flush=True); {trainer}"
    job, log = start(cluster, tmp_path, LauncherConfig(cpus_per_task=1), {"train/main.py": stand_in})
    wait_for(lambda: log.exists() and "here" in log.read_text())
    if state == "CANCELLED":
        cluster.call("scancel", job)
    facts = cluster.wait(job, JobState=state)
    assert facts["Restarts"] == "0"
    assert "queued again" not in log.read_text()


def test_a_job_ends_with_the_reason_why_a_server_did_not_start(cluster: Cluster, tmp_path: Path) -> None:
    launcher = LauncherConfig(nodes=2, capture_nodes=1, cpus_per_task=1)
    job, log = start(cluster, tmp_path, launcher, {"scripts/serve_target": FAILING_SERVER})
    cluster.wait(job, JobState="FAILED")
    printed = log.read_text()
    assert f"the end of {tmp_path}/servers-{job}.log:" in printed
    assert "no memory for the key-value cache" in printed
