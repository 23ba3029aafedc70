"""File systems without flock, or with one that other nodes do not see, for the calling process alone."""

import ctypes
import errno
import platform
import struct

from data.processes import identity

_FLOCK = {"x86_64": 73, "aarch64": 32}  # the number of the system call
_SECCOMP_RET_ERRNO, _SECCOMP_RET_ALLOW = 0x00050000, 0x7FFF0000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
LOCAL = 0  # flock reports success and locks nothing that others see


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def answer_flock(error: int = errno.ENOSYS) -> None:
    """Have the kernel answer every flock of this process with an error number, for the rest of its life.

    Source: seccomp(2) and bpf's classic instructions, linux/filter.h.
    """
    number = _FLOCK[platform.machine()]
    instructions = b"".join(
        struct.pack("HBBI", *one)
        for one in (
            (0x20, 0, 0, 0),  # load the system call's number
            (0x15, 0, 1, number),  # is it flock?
            (0x06, 0, 0, _SECCOMP_RET_ERRNO | error),
            (0x06, 0, 0, _SECCOMP_RET_ALLOW),
        )
    )
    program = _Program(4, instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) == 0


def be_node(name: str) -> None:
    """Be a process of another machine, of whose processes this one cannot tell whether they run."""
    identity._machine = lambda: name
