"""What the batch script does on its node, with stand-ins for Slurm's programs."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from train.config.compose import CHECKOUT
from train.launch.slurm import Job, render
from train.stop import STOPPED

# Each writes its arguments into `calls`. The servers' step runs what is in SERVE.
PROGRAMS = {
    "scontrol": """
case "$*" in
    "show hostnames"*) printf 'n1\\nn2\\n' ;;
    *"show node"*) echo "NodeName=$4 NodeAddr=192.0.2.${4#n} Port=1" ;;
esac""",
    "srun": """
case "$1" in *serve) eval "$SERVE"; exit ;; esac
while [[ $1 == --* ]]; do shift; done
SLURMD_NODENAME=n1 exec "$@" """,
    "python": """
case "$*" in
    *secrets*) echo key ;;
    *urllib*) exit 1 ;;
    *) echo "address $PET_LOCAL_ADDR" >>"$CALLS" ;;
esac""",
    "apptainer": "",
}
SERVED = Job(nodes=2, target_nodes=1, unreachable_seconds=0)
Start = Callable[[Job, str], tuple[subprocess.Popen[bytes], Path]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started = []
    (tmp_path / "bin").mkdir()
    for name, text in PROGRAMS.items():
        path = tmp_path / "bin" / name
        path.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >>"$CALLS"\n{text}\n')
        path.chmod(0o755)

    def start(job: Job, serve: str = "") -> tuple[subprocess.Popen[bytes], Path]:
        python = str(tmp_path / "bin" / "python")
        (tmp_path / "slurm.sh").write_text(render(job, "any_target", [], tmp_path / "run", python))
        (tmp_path / "run").mkdir()
        calls = tmp_path / "calls"
        calls.touch()
        variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_ON_NODE": "1"}
        variables |= {"CALLS": str(calls), "SERVE": serve, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
        with (tmp_path / "printed").open("w") as file:
            process = subprocess.Popen(
                ["bash", tmp_path / "slurm.sh"], env=variables, stderr=file, start_new_session=True
            )
        started.append(process)
        return process, calls

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_job_whose_limit_is_near_while_servers_load_is_queued_again(start: Start) -> None:
    process, calls = start(SERVED, "sleep 1000")
    while "--job-name=serve" not in calls.read_text():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGUSR1)
    assert process.wait() == STOPPED
    assert "scontrol requeue 7" in calls.read_text()
    assert "--job-name=train" not in calls.read_text()


def test_a_server_that_is_ready_and_cannot_be_reached_ends_the_job(start: Start) -> None:
    process, calls = start(SERVED, "echo '0: The server is ready.'; sleep 1000")
    assert process.wait() == 1
    printed = calls.with_name("printed").read_text()
    assert "error: http://192.0.2.2:8000 is ready, but this node cannot reach it" in printed
    assert "requeue" not in calls.read_text()


def test_a_run_starts_in_its_container(start: Start, tmp_path: Path) -> None:
    process, calls = start(Job(nodes=2, apptainer_image="/images/a.sif", mounts=["/data"]), "")
    assert process.wait() == 0
    bound = f"--bind {CHECKOUT} --bind {tmp_path}/run --bind /data"
    inside = f"apptainer exec --nv {bound} /images/a.sif python3 -m torch.distributed.run --nnodes=2"
    assert f"\n{inside}" in calls.read_text()


def test_torchrun_has_the_address_by_which_slurm_reaches_its_node(start: Start) -> None:
    process, calls = start(Job(nodes=2), "")
    assert process.wait() == 0
    assert "address 192.0.2.1" in calls.read_text().splitlines()
