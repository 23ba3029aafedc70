"""The lock of a file: flock where the file system has it for all nodes, otherwise a lease."""

import errno
import fcntl
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from data.locks.lease import LeaseTimes, take_lease
from data.locks.lock import Lock

# What flock raises where the file system does not have it.
_NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
# Mount options and types of file systems with which flock works on one node only.
_LOCAL_OPTIONS = {
    "nfs": {"nolock", "local_lock=flock", "local_lock=all"},
    "nfs4": {"nolock", "local_lock=flock", "local_lock=all"},
    "lustre": {"localflock"},
}
_LOCAL_TYPES = {"beegfs"}  # unless its administrator has chosen otherwise, which a mount does not show
_MOUNTS = Path("/proc/self/mountinfo")
_TIMES = LeaseTimes()


class _KernelLock(Lock):
    """A flock, which the kernel releases when the process ends."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def check(self) -> None:
        """A process that has not closed the file cannot have lost its flock."""

    def close(self) -> None:
        self._file.close()
        self.closed = True


def try_lock(
    path: Path,
    *,
    wait: bool = True,
    times: LeaseTimes = _TIMES,
    on_lost: Callable[[], None] | None = None,
) -> Lock | None:
    """Return the lock of a file, which is created where it does not exist; None where another process has it.

    Args:
        wait: whether to wait for the lease of a process on another node that may have ended, which takes
            up to `times.expire` seconds; otherwise it counts as held.
        on_lost: called in another thread once another process has taken the lease over.

    Raises:
        OSError: the file cannot be created.
    """
    reason = why_no_flock(path)
    if reason is None:
        file = open(path, "w")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return _KernelLock(file)
        except BlockingIOError:
            file.close()
            return None
        except OSError as error:
            file.close()
            if error.errno not in _NO_FLOCK:
                raise
            reason = os.strerror(error.errno or 0)
    _announce(path.parent, reason)
    return take_lease(path, wait, times, on_lost)


def why_no_flock(path: Path) -> str | None:
    """Return why flock would not lock out other nodes, by the mount of the path; None if it would.

    A file system that has no flock at all is known only once it is tried.
    """
    kind, options = _mount_of(path)
    local = _LOCAL_OPTIONS.get(kind, set()) & options
    if local:
        return f"{kind} is mounted with {', '.join(sorted(local))}"
    return f"{kind} locks on one node" if kind in _LOCAL_TYPES else None


def _mount_of(path: Path) -> tuple[str, set[str]]:
    """Return the type and the options of the file system that has a path; an empty type if it is not known.

    Source: proc_pid_mountinfo(5).
    """
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "", set()
    resolved, found = str(path.resolve()), ("", "", set[str]())
    for line in lines:
        fields, _, rest = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields.split()[4])
        below = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if below and len(point) >= len(found[0]):
            kind, _, own = rest.split(" ", 2)
            found = point, kind, {*fields.split()[5].split(","), *own.split(",")}
    return found[1], found[2]


_announced: set[str] = set()


def _announce(directory: Path, reason: str) -> None:
    if str(directory) in _announced:
        return
    _announced.add(str(directory))
    print(
        f"locks: flock does not lock out other nodes in {directory} ({reason}); "
        "leases in files are used instead",
        file=sys.stderr,
    )
