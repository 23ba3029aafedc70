"""A function applied to chunks of data in forked processes, with the results in order."""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, TypeVar

_CHUNKS_PER_WORKER = 4
_Result = TypeVar("_Result")
_Chunk = TypeVar("_Chunk")

_worker_function: Callable[[Any], Any] | None = None


def map_in_order(
    function: Callable[[_Chunk], _Result], chunks: Iterable[_Chunk], num_workers: int
) -> Generator[_Result, None, None]:
    """Yield the function's results in the order of the chunks; at most a few per worker are in progress.

    Args:
        function: inherited by the processes, with everything that it refers to; not pickled.
        num_workers: the number of processes; 1 uses only this process. Workers are forked, so no process
            group may exist yet.
    """
    if num_workers <= 1:
        yield from map(function, chunks)
        return
    # Forked workers inherit what the function needs, so that nothing is imported or loaded again.
    fork = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(num_workers, fork, _start_worker, (function,))
    pending: deque[Future[_Result]] = deque()
    try:
        for chunk in chunks:
            pending.append(pool.submit(_in_worker, chunk))
            if len(pending) > _CHUNKS_PER_WORKER * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(function: Callable[[Any], Any]) -> None:
    global _worker_function
    _worker_function = function
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _in_worker(chunk: Any) -> Any:
    assert _worker_function is not None
    return _worker_function(chunk)
