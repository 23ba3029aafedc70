"""Ending with torchrun, whose processes outlive it otherwise, with GPUs and the output directory's lock."""

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_INIT = 1


def end_with_launcher() -> None:
    """Have the kernel kill this process as soon as the torchrun that started it ends, even by SIGKILL.

    Without torchrun nothing changes, so that a run survives the shell that started it. torchrun starts its
    processes from its main thread: the kernel sends the signal when the thread that started a process ends.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # torchrun may have ended before; in a container it may be the first process itself.
    orphaned = parent == _INIT and b"torch" not in Path(f"/proc/{_INIT}/cmdline").read_bytes()
    if orphaned or os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
