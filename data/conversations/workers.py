"""Functions in forked processes: one alone, or one for each chunk of data with the results in order."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import Any, TypeVar

_CHUNKS_PER_WORKER = 4
_Result = TypeVar("_Result")
_Chunk = TypeVar("_Chunk")

# Forked processes inherit what the function needs, so that nothing is imported or loaded again.
_FORK = multiprocessing.get_context("fork")
_worker_function: Callable[[Any], Any] | None = None


class ProcessKilled(Exception):
    """The error of a process that ended without a result."""


def isolated(function: Callable[[], _Result]) -> _Result:
    """Return what a function returns in a forked process.

    Raises:
        ProcessKilled: the kernel has killed the process, for example for its limits.
        Exception: what the function raises.
    """
    receiver, sender = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_send_result, args=(function, sender), daemon=True)
    process.start()
    sender.close()
    try:
        result, error = receiver.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        raise ProcessKilled(f"its process was ended by {how}") from None
    finally:
        receiver.close()
        process.kill()  # one that has a result does nothing else
        process.join()
    if error is not None:
        raise error
    return result


def _send_result(function: Callable[[], Any], sender: "Connection[Any, Any]") -> None:
    try:
        sender.send((function(), None))
    except Exception as error:
        sender.send((None, error))


def map_in_order(
    function: Callable[[_Chunk], _Result], chunks: Iterable[_Chunk], num_workers: int
) -> Generator[_Result, None, None]:
    """Yield the function's results in the order of the chunks; at most a few per worker are in progress.

    Args:
        function: inherited by the processes, with everything that it refers to; not pickled.
        num_workers: the number of processes; 1 uses only this process. Workers are forked, so no process
            group may exist yet.

    Raises:
        ProcessKilled: the kernel or somebody else has killed one of the processes.
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
        raise ProcessKilled("a worker process was killed") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(function: Callable[[Any], Any]) -> None:
    global _worker_function
    _worker_function = function
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _in_worker(chunk: Any) -> Any:
    assert _worker_function is not None
    return _worker_function(chunk)
