"""The identity of a process, which another one can look up later; standard library only."""

import os
import socket
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Identity:
    """One process, also where its id is used again, in another container or after a restart of the machine.

    machine: this boot of the machine, and the namespace that gives processes their ids.
    process: the id and the start of the process.
    """

    machine: str
    process: str

    @staticmethod
    def of(pid: int) -> "Identity":
        return Identity(_machine(), _process(pid))

    @property
    def has_ended(self) -> bool:
        """Whether this was a process of this machine that no longer exists; False for other machines."""
        if self.machine != _machine():
            return False
        return _process(int(self.process.partition(":")[0])) != self.process

    def to_json(self) -> dict[str, str]:
        return asdict(self)

    @staticmethod
    def from_json(raw: object) -> "Identity | None":
        """Return what `to_json` has written, or None for anything else."""
        match raw:
            case {"machine": str(machine), "process": str(process)} if process.partition(":")[0].isdecimal():
                return Identity(machine, process)
        return None


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{socket.gethostname()}:{uuid.getnode()}"


def _process(pid: int) -> str:
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return f"{pid}:ended"
    # Of a process that has ended and is not reaped, the state is Z or X.
    return f"{pid}:ended" if started[0] in "ZX" else f"{pid}:{started[19]}"
