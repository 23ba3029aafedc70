"""A Slurm cluster of two nodes on this machine, with real daemons on loopback and without root."""

import getpass
import os
import platform
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.train.torchrun import ROOT, environment

# The scheduler looks for a job to start every second.
CONFIGURATION = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
PluginDir={libraries}/slurm-wlm
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=2
MessageTimeout=60
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first_port} CPUs=1 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second_port} CPUs=1 State=UNKNOWN
PartitionName=both Nodes=n1,n2 Default=YES MaxTime=INFINITE
"""


@dataclass(frozen=True)
class Cluster:
    """A running Slurm cluster; its commands need `environment`."""

    environment: dict[str, str]

    def call(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def job_fields(self, job: str) -> dict[str, str]:
        """Return Slurm's fields of a job: JobState, Restarts, ExitCode, ..."""
        fields = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def wait(self, job: str, seconds: float = 240, **expected: str) -> dict[str, str]:
        """Wait until the job's fields have the expected values."""
        deadline = time.monotonic() + seconds
        while not expected.items() <= (fields := self.job_fields(job)).items():
            assert time.monotonic() < deadline, (expected, fields)
            assert fields["JobState"] not in ("COMPLETED", "FAILED", "CANCELLED"), (expected, fields)
            time.sleep(0.2)
        return fields


def debian_packages() -> Path:
    """Return the folder of Slurm's programs; it is made at first use."""
    if shutil.which("apt-get") is None:
        pytest.skip("Slurm comes from Debian's packages here, and this machine has no apt-get")
    setup = subprocess.run(
        [ROOT / "scripts" / "setup" / "slurm"], capture_output=True, text=True, timeout=280
    )
    if setup.returncode:
        pytest.skip(f"Slurm's packages could not be fetched: {setup.stderr.strip()[-500:]}")
    return Path(setup.stdout.strip())


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Start the daemons; at the end cancel all jobs and stop the daemons."""
    prefix = debian_packages()
    # The path is short because that of munged's socket is limited to 108 characters.
    directory = Path(tempfile.mkdtemp(prefix="slurm-"))
    libraries = prefix / "usr" / "lib" / f"{platform.machine()}-linux-gnu"
    programs, daemons = prefix / "usr" / "bin", prefix / "usr" / "sbin"
    variables = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": f"{libraries}:{libraries / 'slurm-wlm'}",
        "SLURM_CONF": str(directory / "slurm.conf"),
    }
    write_configuration(directory, libraries)
    munge_files = [f"--{name}-file={directory / f'munge.{name}'}" for name in ("key", "log", "pid", "seed")]
    munge_files.append(f"--socket={directory / 'munge.socket'}")
    stepd = ["-d", str(daemons / "slurmstepd-wlm")]
    cluster = Cluster(environment() | variables)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        for name, command in {
            "munged": [daemons / "munged", "--foreground", "--force", *munge_files],
            "slurmctld": [daemons / "slurmctld-wlm", "-D", "-c"],
            "n1": [daemons / "slurmd-wlm", "-D", "-N", "n1", *stepd],
            "n2": [daemons / "slurmd-wlm", "-D", "-N", "n2", *stepd],
        }.items():
            stack.enter_context(daemon([str(word) for word in command], directory / f"{name}.log", cluster))
            if name == "munged":
                wait_for(lambda: (directory / "munge.socket").exists())
        wait_for(lambda: nodes_idle(cluster) == 2)
        stack.callback(wait_for, lambda: nodes_idle(cluster) == 2)
        stack.callback(cluster.call, "scancel", "--user", getpass.getuser())
        yield cluster


def write_configuration(directory: Path, libraries: Path) -> None:
    (directory / "munge.key").write_bytes(os.urandom(128))
    (directory / "munge.key").chmod(0o600)
    (directory / "state").mkdir()
    first_port, second_port, controller_port = free_ports(3)
    text = CONFIGURATION.format(
        host=platform.node().split(".")[0],
        user=getpass.getuser(),
        directory=directory,
        libraries=libraries,
        controller_port=controller_port,
        first_port=first_port,
        second_port=second_port,
    )
    (directory / "slurm.conf").write_text(text)


@contextmanager
def daemon(command: list[str], log: Path, cluster: Cluster) -> Iterator[None]:
    with open(log, "w") as file:
        process = subprocess.Popen(command, env=cluster.environment, stdout=file, stderr=file)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=60)


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def nodes_idle(cluster: Cluster) -> int:
    command = ["sinfo", "--noheader", "--Node", "--format=%T"]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, timeout=60)
    return done.stdout.split().count("idle")


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
