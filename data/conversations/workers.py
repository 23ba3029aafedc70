"""A function of chunks of data in forked processes, with the results in order."""

import ctypes
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from eagle31.errors import UserError

_CHUNKS_PER_WORKER = 4
_PR_SET_PDEATHSIG = 1  # prctl(2)
_Result = TypeVar("_Result")
_Chunk = TypeVar("_Chunk")

# Forked processes inherit what the function needs, so that nothing is imported or loaded again.
_FORK = multiprocessing.get_context("fork")
_worker_function: Callable[[Any], Any] | None = None


def end_with_parent() -> None:
    """Have the kernel kill this process, which multiprocessing has started, as soon as its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    assert parent is not None
    if os.getppid() != parent.pid:  # it has ended before
        os._exit(1)


def map_in_order(
    function: Callable[[_Chunk], _Result], chunks: Iterable[_Chunk], num_workers: int
) -> Generator[_Result, None, None]:
    """Yield the function's results in the order of the chunks; at most a few per worker are in progress.

    Args:
        function: inherited by the processes, with everything that it refers to; not pickled.
        num_workers: the number of processes; 1 uses only this process. Workers are forked, so no process
            group may exist yet.

    Raises:
        UserError: one of the processes was killed.
        Exception: what the function raises.
    """
    if num_workers <= 1:
        yield from map(function, chunks)
        return
    pool = ProcessPoolExecutor(num_workers, _FORK, _start_worker, (function,))
    pending: deque[Future[_Result]] = deque()
    try:
        for chunk in chunks:
            pending.append(pool.submit(_in_worker, chunk))
            if len(pending) > _CHUNKS_PER_WORKER * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        remedy = (
            "One of them was killed, as where the machine has no memory for a process on each core. Run the "
            "same command again, on fewer cores: taskset -c 0-3 COMMAND."
        )
        raise UserError("data", f"{num_workers} processes", remedy) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(function: Callable[[Any], Any]) -> None:
    global _worker_function
    _worker_function = function
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _in_worker(chunk: Any) -> Any:
    assert _worker_function is not None
    return _worker_function(chunk)
