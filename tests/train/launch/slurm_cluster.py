"""A Slurm cluster of two nodes on this host, with real daemons.

The nodes are either two names of this host, which needs no root, or machines as in machines.py.
"""

import getpass
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from data.cache import cache_directory
from tests.processes import free_ports, wait_for
from tests.runs.forked import ROOT, environment
from tests.train.launch.machines import Machines, running_machines

# The scheduler looks for a job to start every second.
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}({address})
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
FirstJobId={first_job}
{nodes}
PartitionName=both Nodes=n1,n2 Default=YES MaxTime=INFINITE
"""


@dataclass(frozen=True)
class Cluster:
    """A running Slurm cluster; its commands need `environment`."""

    environment: dict[str, str]
    machines: Machines | None = None  # None: both nodes are this host

    def at_controller(self, *command: str) -> list[str]:
        """Return the command that runs `command` where Slurm's controller is reached."""
        return list(command) if self.machines is None else self.machines.at_hub(*command)

    def call(self, *command: str) -> str:
        done = subprocess.run(
            self.at_controller(*command),
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def job_fields(self, job: str) -> dict[str, str]:
        """Return Slurm's fields of a job: JobState, Restarts, ExitCode, ..."""
        fields = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def wait(self, job: str, seconds: float = 1000, **expected: str) -> dict[str, str]:
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
    setup = subprocess.run([ROOT / "scripts" / "setup" / "slurm"], capture_output=True, text=True)
    if setup.returncode:
        pytest.skip(f"Slurm's packages could not be fetched: {setup.stderr.strip()[-500:]}")
    return Path(setup.stdout.strip())


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Start two nodes that are both this host; at the end cancel all jobs and stop the daemons."""
    with cluster_directory() as directory, slurm(directory, None) as cluster:
        yield cluster


@contextmanager
def running_apart_cluster(shared: Sequence[Path]) -> Iterator[Cluster]:
    """Start two nodes that are machines; `shared` as for `running_machines`.

    Both see this checkout, the environments and the programs of this host.
    """
    # Machines skip the test sooner than Debian's packages come.
    with cluster_directory() as directory:
        # With the environments that the scripts in scripts/setup create.
        cache_directory().mkdir(parents=True, exist_ok=True)
        seen = [directory, ROOT, Path(sys.prefix), cache_directory(), *shared]
        with running_machines(["n1", "n2"], seen) as machines, slurm(directory, machines) as cluster:
            yield cluster


@contextmanager
def cluster_directory() -> Iterator[Path]:
    # The path is short because that of munged's socket is limited to 108 characters.
    directory = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def slurm(directory: Path, machines: Machines | None) -> Iterator[Cluster]:
    """Run the daemons; at the end cancel all jobs."""
    prefix = debian_packages()
    libraries = prefix / "usr" / "lib" / f"{platform.machine()}-linux-gnu"
    programs, daemons = prefix / "usr" / "bin", prefix / "usr" / "sbin"
    variables = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": f"{libraries}:{libraries / 'slurm-wlm'}",
        "SLURM_CONF": str(directory / "slurm.conf"),
    }
    write_configuration(directory, libraries, machines)
    munge_files = [f"--{name}-file={directory / f'munge.{name}'}" for name in ("key", "log", "pid", "seed")]
    munge_files.append(f"--socket={directory / 'munge.socket'}")
    cluster = Cluster(environment() | variables, machines)
    slurmd = [str(daemons / "slurmd-wlm"), "-D", "-d", str(daemons / "slurmstepd-wlm"), "-N"]
    starts = {
        "munged": [str(daemons / "munged"), "--foreground", "--force", *munge_files],
        "slurmctld": cluster.at_controller(str(daemons / "slurmctld-wlm"), "-D", "-c"),
    }
    if machines is None:
        starts |= {name: [*slurmd, name] for name in ("n1", "n2")}
    else:
        starts |= {one.name: one.inside(*slurmd, one.name) for one in machines.members}
    with ExitStack() as stack:
        for name, command in starts.items():
            stack.enter_context(daemon(command, directory / f"{name}.log", cluster))
            if name == "munged":
                wait_for(lambda: (directory / "munge.socket").exists())
        wait_for(lambda: nodes_idle(cluster) == 2)
        stack.callback(wait_for, lambda: nodes_idle(cluster) == 2)
        stack.callback(cluster.call, "scancel", "--user", getpass.getuser())
        yield cluster


def write_configuration(directory: Path, libraries: Path, machines: Machines | None) -> None:
    (directory / "munge.key").write_bytes(os.urandom(128))
    (directory / "munge.key").chmod(0o600)
    (directory / "state").mkdir()
    host = platform.node().split(".")[0]
    first_port, second_port, controller_port = free_ports(3)
    if machines is None:
        address, names = "127.0.0.1", [host, host]
        addresses, ports = [address, address], [first_port, second_port]
    else:
        address, names = machines.hub_address, [one.name for one in machines.members]
        addresses, ports = [one.address for one in machines.members], [first_port, first_port]
    nodes = [
        f"NodeName=n{number} NodeHostname={name} NodeAddr={where} Port={port} CPUs=1 State=UNKNOWN"
        for number, (name, where, port) in enumerate(zip(names, addresses, ports, strict=True), 1)
    ]
    text = CONFIGURATION.format(
        host=host,
        address=address,
        user=getpass.getuser(),
        directory=directory,
        libraries=libraries,
        controller_port=controller_port,
        first_job=os.getpid() % 10_000
        + 1,  # a job's port follows from its number; this host may have more clusters
        nodes="\n".join(nodes),
    )
    (directory / "slurm.conf").write_text(text)


@contextmanager
def daemon(command: Sequence[str], log: Path, cluster: Cluster) -> Iterator[None]:
    with open(log, "w") as file:
        process = subprocess.Popen(command, env=cluster.environment, stdout=file, stderr=file)
    try:
        yield
    finally:
        # Also where it is `nsenter` that forwards no signal.
        for one in [*psutil.Process(process.pid).children(), process]:
            one.terminate()
        process.wait()


def nodes_idle(cluster: Cluster) -> int:
    command = cluster.at_controller("sinfo", "--noheader", "--Node", "--format=%T")
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True)
    return done.stdout.split().count("idle")
