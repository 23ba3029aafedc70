"""The machine's memory and limits."""

import os
import resource
import shutil
from pathlib import Path

from train.doctor.check import Check, Status, judged, ok
from train.planning.memory_check import gigabytes

_MEMORY_FILE = Path("/proc/meminfo")
_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_GROUP_USE = Path("/sys/fs/cgroup/memory.current")
_KIB = 1024


def memory_check(available_bytes: int, needed_bytes: int, what: str) -> Check:
    """Return whether the machine has the memory that the run takes outside its GPUs.

    Args:
        what: what takes it.
    """
    remedy = "End other programs, or choose smaller settings: stages=[plan] says what takes how much."
    needed = f"{gigabytes(needed_bytes)} for {what}"
    found = f"{gigabytes(available_bytes)} available"
    good = available_bytes >= needed_bytes
    return judged("memory", good, found, needed, remedy, otherwise=Status.warning)


def available_memory() -> int:
    """Return the bytes that processes here can still allocate: the machine's, or those of their group."""
    machine = 0
    for line in _MEMORY_FILE.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            machine = int(line.split()[1]) * _KIB
    try:
        limit, used = _GROUP_LIMIT.read_text().strip(), int(_GROUP_USE.read_text())
    except (OSError, ValueError):
        return machine
    return machine if limit == "max" else min(machine, max(0, int(limit) - used))


def locked_memory_check(limit: int, registers: str | None) -> Check:
    """Return whether enough memory can be locked. What CUDA pins does not count towards the limit.

    Args:
        limit: RLIMIT_MEMLOCK in bytes.
        registers: what registers memory with a network card; None: nothing does.
    """
    unlimited = limit == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else gigabytes(limit)
    if registers is None:
        return ok("locked memory", found)
    remedy = "Raise it: ulimit -l unlimited, --ulimit memlock=-1 of Docker, LimitMEMLOCK=infinity of slurmd."
    needed = f"unlimited for {registers}"
    return judged("locked memory", unlimited, found, needed, remedy, otherwise=Status.warning)


def open_files_check(soft: int, hard: int, needed: int) -> Check:
    """Return whether a process can open as many files and connections as one of the run's may have.

    Args:
        soft, hard: the limits.
        needed: an estimate.
    """
    unlimited = resource.RLIM_INFINITY
    good = soft == unlimited or soft >= needed
    allowed = hard == unlimited or hard >= needed
    remedy = f"Raise it: ulimit -n {needed}" + (
        "" if allowed else f"; the hard limit is {hard}, ask the administrator"
    )
    found = "unlimited" if soft == unlimited else str(soft)
    return judged("open files", good, found, str(needed), f"{remedy}.", otherwise=Status.warning)


def shared_memory_check(free_bytes: int, needed_bytes: int, what: str, remedy: str) -> Check:
    """Return whether /dev/shm has room.

    Args:
        what: what is there.
    """
    found = f"{gigabytes(free_bytes)} free"
    if not needed_bytes:
        return ok("/dev/shm", found)
    return judged(
        "/dev/shm", free_bytes >= needed_bytes, found, f"{gigabytes(needed_bytes)} for {what}", remedy
    )


def free_shared_memory() -> int:
    """Return the free bytes of /dev/shm; 0 where there is none."""
    return shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0


def has_infiniband() -> bool:
    """Whether the machine has a network card for RDMA."""
    directory = Path("/sys/class/infiniband")
    return directory.is_dir() and any(directory.iterdir())
