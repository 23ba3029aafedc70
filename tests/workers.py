"""xdist's workers as forks of the server in tests/runs/forked.py: none has to import what it has imported."""

import os
import sys
from multiprocessing import Pipe, forkserver
from multiprocessing.connection import Connection
from typing import Any

from execnet import gateway_io
from execnet.gateway_base import Popen2IO

from tests.runs.forked import CONTEXT


def fork_workers() -> None:
    """Have xdist fork the workers that it starts from now on."""
    gateway_io.Popen2IOMaster = ForkedWorker  # type: ignore[misc, assignment]
    forkserver.ensure_running()


class ForkedWorker(Popen2IO):
    """What execnet has for a worker that is a new interpreter."""

    def __init__(self, command: object, execmodel: Any) -> None:
        commands, to_worker = Pipe(duplex=False)
        from_worker, results = Pipe(duplex=False)
        self._process = CONTEXT.Process(target=_serve, args=(commands, results))
        self._process.start()
        outfile, infile = (
            os.fdopen(os.dup(one.fileno()), mode) for one, mode in ((to_worker, "wb"), (from_worker, "rb"))
        )
        for one in (commands, to_worker, from_worker, results):
            one.close()
        super().__init__(outfile, infile, execmodel)

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _serve(commands: Connection, results: Connection) -> None:
    """Be the worker, as the interpreter is that execnet starts. Its runs are forks of the same server."""
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    for descriptor, one in enumerate((commands, results)):
        os.dup2(one.fileno(), descriptor)
        one.close()
    sys.stdin, sys.stdout = os.fdopen(0, "r", 1, closefd=False), os.fdopen(1, "w", 1, closefd=False)
    exec(eval(sys.stdin.readline()))
