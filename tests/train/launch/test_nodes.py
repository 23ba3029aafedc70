"""Several nodes: with and without Slurm they train as one does. About 50 s on two quiet cores."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from data.embedded.target import EmbeddedTarget
from eagle31.json_files import read_json
from tests.preloaded.start import program_of
from tests.train.launch.slurm_cluster import Cluster, free_ports, running_cluster, wait_for
from tests.train.small_run import MAIN, RECIPE, metrics_of, saved_steps, wait_for_step
from tests.train.small_run import arguments as tiny_arguments
from tests.train.torchrun import ROOT, environment, preloaded_python, torchrun
from train.config.launcher import LauncherConfig
from train.launch.slurm import Submission, render
from train.lifetime.stops import STOPPED_FILE

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


def test_two_nodes_without_slurm(
    small_target: EmbeddedTarget,
    captured: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if not request.config.getoption("--full"):
        pytest.skip("--full runs it: a job of Slurm starts torchrun in the same way")
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
    assert metrics_of(directory) == request.getfixturevalue("one_node")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Jobs start a real torchrun, whose ranks are forks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHON_EXEC", preloaded_python())
        with running_cluster() as running:
            yield running


def submit(cluster: Cluster, *more: str) -> str:
    """The job's number."""
    launcher = ["launcher=slurm", "launcher.nodes=2", "launcher.gpus_per_node=0", "launcher.cpus_per_task=1"]
    launcher += ["launcher.time=30", "launcher.signal_seconds=100"]
    printed = cluster.call(sys.executable, "scripts/submit", f"recipe={RECIPE}", *launcher, *more)
    return printed.split()[1].rstrip(",")


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


def wait_for_signal(log: Path, line: str) -> None:
    """Wait until, after this line of the log, torchrun has received a signal to end on both nodes."""
    deadline = time.monotonic() + 120
    while log.read_text().partition(line)[2].count("Received 15 death signal") < 2:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def start_again(cluster: Cluster, job: str, restarts: int) -> None:
    """Start a requeued job, which Slurm would hold back for two minutes by default.

    The start has to be some seconds later: slurmd distinguishes a new credential from the revoked one by the
    second in which it was made.
    """
    cluster.wait(job, Restarts=str(restarts), JobState="PENDING")
    cluster.call("scontrol", "update", f"JobId={job}", "TimeLimit=30", "StartTime=now+3")
    cluster.wait(job, JobState="RUNNING")


def stopped_at(directory: Path) -> int:
    """The step of the newest checkpoint, after which nothing was trained."""
    step = int(saved_steps(directory)[-1].removeprefix("step-"))
    assert metrics_of(directory)[-1]["step"] == step
    return step


def test_a_job_that_is_near_its_time_limit_saves_and_resumes(
    small_target: EmbeddedTarget, captured: Path, one_node: list[dict], cluster: Cluster, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(captured, directory)
    job = submit(cluster, *arguments(small_target, directory))
    log = directory / f"slurm-{job}.out"
    held = hold_at(directory, 3)
    # The signal that Slurm sends before the time limit.
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    wait_for_signal(log, "the time limit is near")
    for process in held:
        process.send_signal(signal.SIGCONT)
    start_again(cluster, job, 1)
    step = stopped_at(directory)
    assert 3 <= step < STEPS
    facts = cluster.wait(job, JobState="COMPLETED")
    assert (facts["Restarts"], facts["ExitCode"]) == ("1", "0:0")
    printed = log.read_text()
    assert f"resuming after step {step} of" in printed
    assert printed.count("queued again") == 1
    assert metrics_of(directory) == one_node


def test_slurm_requeues_a_job_and_sends_the_signal_before_its_time_limit(
    small_target: EmbeddedTarget,
    captured: Path,
    cluster: Cluster,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if not request.config.getoption("--full"):
        pytest.skip("--full runs it: Slurm looks at time limits every 30 s only")
    directory = tmp_path / "run"
    shutil.copytree(captured, directory)
    job = submit(cluster, *arguments(small_target, directory))
    log = directory / f"slurm-{job}.out"
    hold_at(directory, 3)
    cluster.call("scontrol", "requeue", job)  # Slurm lets stopped processes continue
    start_again(cluster, job, 1)
    first = stopped_at(directory)
    assert 3 <= first < STEPS - 8

    held = hold_at(directory, first + 3)
    # From now on the signal is due.
    cluster.call("scontrol", "update", f"JobId={job}", "TimeLimit=2")
    wait_for_signal(log, "the time limit is near")
    for process in held:
        process.send_signal(signal.SIGCONT)
    start_again(cluster, job, 2)
    assert first + 3 <= stopped_at(directory) < STEPS
    cluster.wait(job, JobState="COMPLETED", Restarts="2")
    assert log.read_text().count("queued again") == 1
    assert metrics_of(directory) == request.getfixturevalue("one_node")


def test_a_job_stops_before_its_end_though_no_signal_comes(
    small_target: EmbeddedTarget,
    captured: Path,
    cluster: Cluster,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if not request.config.getoption("--full"):
        pytest.skip("--full runs it: the shortest job of Slurm takes a minute")
    directory = tmp_path / "run"
    shutil.copytree(captured, directory)
    settings = ["train.max_steps=100000", "launcher.time=1", "launcher.signal_seconds=1"]
    settings.append("launcher.sbatch=['--signal=B:URG@1']")  # which a shell ignores
    job = submit(cluster, *arguments(small_target, directory), *settings)
    log = directory / f"slurm-{job}.out"
    cluster.wait(job, Restarts="1", JobState="PENDING")
    assert read_json(directory / STOPPED_FILE)["reason"] == "the time limit"
    assert "slurm: queued again" in log.read_text()
    assert "the time limit is near" not in log.read_text()
    cluster.call("scancel", job)


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
