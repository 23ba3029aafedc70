"""Stand-ins for machines: processes on this host that share as little as those of different machines do.

Each machine has its own network with its own loopback and address, and its own process ids, host name,
/dev/shm and /tmp. This needs root. When the test session ends, whatever ends it, so do the machines with all
their processes and networks.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

PROGRAMS = ("unshare", "nsenter", "ip", "mount", "hostname")
PRIVATE = (Path("/dev/shm"), Path("/tmp"))
SEPARATE = ("--net", "--mount", "--uts", "--ipc", "--pid", "--mount-proc")
_HUB_ADDRESS, _ADDRESSES = "10.77.0.1/24", "10.77.0.{}"
_FIRST_DESCRIPTOR = 10  # bash uses lower ones itself


@dataclass(frozen=True)
class Machine:
    """One machine: the namespaces of the process `process_id`, which ends last."""

    name: str
    address: str
    process_id: int

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs `command` on this machine."""
        namespaces = ["--mount", "--net", "--pid", "--uts", "--ipc"]
        return ["nsenter", "--target", str(self.process_id), *namespaces, "--", *command]


@dataclass(frozen=True)
class Machines:
    """Machines in one network, with a hub that has this host's files and an address in the network."""

    hub: int  # the process whose network is that of the hub
    hub_address: str
    members: list[Machine]

    def at_hub(self, *command: str) -> list[str]:
        """Return the command that runs `command` with this host's files and the machines' network."""
        return ["nsenter", "--target", str(self.hub), "--net", "--", *command]


@contextmanager
def running_machines(names: Sequence[str], shared: Sequence[Path]) -> Iterator[Machines]:
    """Start machines that see this host's files, except those in private directories.

    Args:
        shared: directories that all see, even within private ones.
    """
    require_namespaces()
    with ExitStack() as stack:
        hub = stack.enter_context(namespaces(["--net"], "ip link set lo up"))
        run(["nsenter", "--target", str(hub), "--net", "ip", "link", "add", "hub", "type", "bridge"])
        machines = Machines(hub, _HUB_ADDRESS.partition("/")[0], [])
        run(machines.at_hub("ip", "address", "add", _HUB_ADDRESS, "dev", "hub"))
        run(machines.at_hub("ip", "link", "set", "hub", "up"))
        for number, name in enumerate(names, 2):
            setup = machine_setup(name, shared, PRIVATE)
            process_id = stack.enter_context(namespaces(SEPARATE, setup))
            machine = Machine(name, _ADDRESSES.format(number), process_id)
            peer = ["peer", "name", "eth0", "netns", str(process_id)]
            run(machines.at_hub("ip", "link", "add", name, "type", "veth", *peer))
            run(machines.at_hub("ip", "link", "set", name, "master", "hub", "up"))
            run(machine.inside("ip", "address", "add", f"{machine.address}/24", "dev", "eth0"))
            run(machine.inside("ip", "link", "set", "eth0", "up"))
            machines.members.append(machine)
        yield machines


def require_namespaces() -> None:
    """Skip the test where this host cannot have such machines."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"machines of one host need {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("machines of one host need root, for network and mount namespaces")
    allowed = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True)
    if allowed.returncode:
        pytest.skip(f"this host allows no namespaces: {allowed.stderr.decode().strip()}")


def machine_setup(name: str, shared: Sequence[Path], private: Sequence[Path]) -> str:
    """Return shell lines that hide private directories, and show the shared ones that lie within them."""
    lines = [f"hostname {name}", "ip link set lo up"]
    hidden = [path for path in shared if any(path.is_relative_to(one) for one in private)]
    lines += [
        f"exec {number}<{shlex.quote(str(path))}" for number, path in enumerate(hidden, _FIRST_DESCRIPTOR)
    ]
    lines += [f"mkdir -p {path} && mount -t tmpfs tmpfs {path}" for path in map(quoted, private)]
    for number, path in enumerate(map(quoted, hidden), _FIRST_DESCRIPTOR):
        lines.append(f"mkdir -p {path} && mount --no-canonicalize --rbind /proc/self/fd/{number} {path}")
        lines.append(f"exec {number}<&-")
    return "\n".join(lines)


def quoted(path: Path) -> str:
    return shlex.quote(str(path))


@contextmanager
def namespaces(separate: Sequence[str], setup: str) -> Iterator[int]:
    """Start a process in new namespaces; yield its id once the shell lines of `setup` have run.

    It ends with its standard input, so also when this process is killed. Where it has its own process ids,
    the kernel then kills everything in them.
    """
    # As the first process it has to collect those whose parents have ended, which bash does.
    script = f"set -e\n{setup}\necho ready\nwhile read -r _; do :; done"
    command = ["unshare", *separate, "--fork", "--kill-child", "bash", "-c", script]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line == "ready\n", line + process.stdout.read()
            [first] = psutil.Process(process.pid).children()
            yield first.pid
        finally:
            process.stdin.close()
            process.wait()


def run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stderr)
