"""The limits of a template: on time, on memory, and on a single operation."""

import os
import resource
import signal
import threading
from functools import partial

import pytest

from data.conversations.limits import TooLong, confined, time_limit
from data.conversations.workers import ProcessKilled, isolated, map_in_order

MB = 1 << 20


def endless() -> None:
    while True:
        pass


def power() -> int:
    with confined(0, 1 << 30):
        return len(str(10 ** (10**9)))


def test_python_is_interrupted() -> None:
    with pytest.raises(TooLong), time_limit(0.05):
        endless()
    assert signal.getsignal(signal.SIGVTALRM) is signal.SIG_DFL


def test_memory_beyond_the_limit_is_refused_and_the_limits_are_restored() -> None:
    before = [resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU)]
    with confined(60, 200 * MB):
        assert len("x" * (100 * MB)) == 100 * MB
    with pytest.raises(MemoryError), confined(60, 200 * MB):
        "x" * (300 * MB)
    assert [resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU)] == before


def test_another_thread_is_not_limited() -> None:
    found = []

    def allocate() -> None:
        with time_limit(0), confined(0, 0):
            found.append(len("x" * (300 * MB)))

    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    assert found == [300 * MB]


def test_an_operation_that_cannot_be_interrupted_ends_its_process(capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(ProcessKilled, match="ended by SIGXCPU"):
        isolated(power)
    assert "in power" in capfd.readouterr().err


def test_a_killed_worker_is_named() -> None:
    with pytest.raises(ProcessKilled, match="a worker process was killed"):
        list(map_in_order(lambda _: os.kill(os.getpid(), signal.SIGKILL), [1], 2))


def test_an_isolated_function_returns_and_raises() -> None:
    assert isolated(partial(sum, [1, 2])) == 3
    with pytest.raises(ZeroDivisionError):
        isolated(lambda: 1 // 0)
