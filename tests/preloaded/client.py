"""Stands for a Python interpreter: has `server.py` run the program, and is to its parent what that would be.

`start.py` installs this file as `DIRECTORY/bin/python`, next to the server's socket in DIRECTORY.
"""

import array
import ctypes
import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    if "-S" in sys.argv:  # without packages it starts as quickly itself
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    if "--multiprocessing-fork" in sys.argv:  # multiprocessing has no supervisor that would end it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    # More than the standard ones where the parent passes some.
    numbers = [number for number in map(int, os.listdir("/proc/self/fd")) if is_open(number)]
    directory = os.open(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.O_RDONLY)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(f"/proc/self/fd/{directory}/socket")  # the address of a socket may have 108 characters
    request = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "process": os.getpid(),
        "executable": os.path.abspath(__file__),
        "descriptors": numbers,
    }
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    descriptors = array.array("i", numbers)
    server.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
    process = int(server.recv(32))
    for number in FORWARDED:
        signal.signal(number, lambda number, _: os.kill(process, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    status = int(server.recv(32))
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


main()
