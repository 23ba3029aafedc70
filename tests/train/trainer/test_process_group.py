"""The process group of a run: where it listens, and what DeepSpeed asks for."""

import subprocess
import sys
from pathlib import Path

from tests.runs.forked import ROOT
from tests.train.launch.machines import SEPARATE, Machine, namespaces, require_namespaces

PROGRAM = """
import socket, struct, sys
sys.path.insert(0, sys.argv[1])
from train.trainer.process_groups import ensure_process_group
ensure_process_group()
for line in open("/proc/self/net/tcp"):
    address, state = line.split()[1], line.split()[3]
    if state == "0A":  # it listens
        print("listens", socket.inet_ntoa(struct.pack("=I", int(address.partition(":")[0], 16))))
"""
ADDRESS = "10.1.1.1"
# A machine whose name leads to its address in a network, as is usual.
SETUP = f"""hostname apart
ip link set lo up
ip link add outside type veth peer name peer
ip address add {ADDRESS}/24 dev outside
ip link set outside up
mount --bind HOSTS /etc/hosts"""


def test_a_run_on_one_node_listens_on_loopback(tmp_path: Path) -> None:
    require_namespaces()
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{ADDRESS} apart\n")
    with namespaces(SEPARATE, SETUP.replace("HOSTS", str(hosts))) as process:
        machine = Machine("apart", ADDRESS, process)
        printed = subprocess.run(
            machine.inside(sys.executable, "-c", PROGRAM, str(ROOT)),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    assert {line for line in printed.splitlines() if line.startswith("listens")} == {"listens 127.0.0.1"}
