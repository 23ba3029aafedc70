"""Stands for a Python interpreter: has `server.py` run the program, and is to its parent what that would be.

`start.py` installs this file as `DIRECTORY/bin/python`, next to the server's socket in DIRECTORY.
"""

import array
import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    directory = os.open(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.O_RDONLY)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(f"/proc/self/fd/{directory}/socket")  # the address of a socket may have 108 characters
    request = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "process": os.getpid(),
    }
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    descriptors = array.array("i", [0, 1, 2])
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


main()
