"""The lock of a file, among the processes of all nodes that share its file system."""

import errno
import fcntl
import os
import socket
import time
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import IO

from eagle31.errors import UserError

_POLL_SECONDS = 0.1
# What flock raises where the file system does not have it.
_NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


def try_lock(path: Path) -> IO[str] | None:
    """Return the lock of a file, which is created where it does not exist; None where another process has it.

    The kernel releases the lock when it is closed, or when the process ends: processes that multiprocessing
    forks do not have it.

    Raises:
        UserError: the file system has no flock.
        OSError: the file cannot be created.
    """
    file = open(path, "a")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError as error:
        file.close()
        if error.errno not in _NO_FLOCK:
            raise
        remedy = (
            f"Its file system has no flock ({os.strerror(error.errno or 0)}). Mount it so that it has, as "
            "Lustre with `-o flock`, or give a directory on another one."
        )
        raise UserError("lock", path, remedy) from error
    register_after_fork(file, lambda inherited: inherited.close())  # as long as the lock exists
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
    return file


def lock(path: Path) -> IO[str]:
    """Return the lock of a file once no other process has it; raise what `try_lock` does."""
    while (taken := try_lock(path)) is None:
        time.sleep(_POLL_SECONDS)
    return taken


def holder(path: Path) -> str:
    """Return the process that took the lock last, for messages."""
    return path.read_text().strip() or "an unknown process"
