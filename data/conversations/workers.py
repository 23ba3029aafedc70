"""Functions in forked processes: one alone, or one for each chunk of data with the results in order."""

import ctypes
import multiprocessing
import os
import resource
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

_CHUNKS_PER_WORKER = 4
# A chat template comes with somebody else's model. Jinja's sandbox stops what it reads and calls, and not
# what it computes: `{{ 'x' * 10 ** 10 }}` takes 10 GB, and `{{ 10 ** (10 ** 10) }}` never ends.
ISOLATED_SECONDS, _CHUNK_SECONDS = 60.0, 1800.0
_MEMORY_BYTES = 1 << 32  # that a worker may take in addition to what it has inherited
_PR_SET_PDEATHSIG = 1  # prctl(2)
_Result = TypeVar("_Result")
_Chunk = TypeVar("_Chunk")

# Forked processes inherit what the function needs, so that nothing is imported or loaded again.
_FORK = multiprocessing.get_context("fork")
_worker_function: Callable[[Any], Any] | None = None


class ProcessKilled(Exception):
    """The error of a process that ended without a result."""


def end_with_parent() -> None:
    """Have the kernel kill this process, which multiprocessing has started, as soon as its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    assert parent is not None
    if os.getppid() != parent.pid:  # it has ended before
        os._exit(1)


def isolated(function: Callable[[], _Result], seconds: float = ISOLATED_SECONDS) -> _Result:
    """Return what a function returns in a forked process; raise what `map_in_order` does."""
    with closing(map_in_order(lambda _: function(), [None], num_workers=2, seconds=seconds)) as results:
        return next(results)


def map_in_order(
    function: Callable[[_Chunk], _Result],
    chunks: Iterable[_Chunk],
    num_workers: int,
    seconds: float = _CHUNK_SECONDS,
) -> Generator[_Result, None, None]:
    """Yield the function's results in the order of the chunks; at most a few per worker are in progress.

    Args:
        function: inherited by the processes, with everything that it refers to; not pickled.
        num_workers: the number of processes; 1 uses only this process. Workers are forked, so no process
            group may exist yet.
        seconds: the longest time for a chunk.

    Raises:
        ProcessKilled: a chunk has taken longer, or somebody has killed one of the processes.
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
                yield pending.popleft().result(seconds)
        while pending:
            yield pending.popleft().result(seconds)
    except FutureTimeout as error:
        for process in list(pool._processes.values()):
            process.kill()
        raise ProcessKilled(f"it takes more than {seconds:g} s") from error
    except BrokenProcessPool as error:
        raise ProcessKilled("it was killed") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _limit_memory() -> None:
    """Have Python raise MemoryError where this process takes too much."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = pages * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))


def _start_worker(function: Callable[[Any], Any]) -> None:
    global _worker_function
    _worker_function = function
    end_with_parent()
    _limit_memory()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _in_worker(chunk: Any) -> Any:
    assert _worker_function is not None
    return _worker_function(chunk)
