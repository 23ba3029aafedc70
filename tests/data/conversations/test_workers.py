import multiprocessing
import os
import time

import pytest

from data.conversations.workers import map_in_order
from eagle31.errors import UserError


@pytest.mark.parametrize("num_workers", [1, 3])
def test_results_are_in_the_order_of_the_chunks(num_workers: int) -> None:
    def slow_first(chunk: int) -> int:
        time.sleep(0.05 if chunk == 0 else 0)
        return chunk * chunk

    assert list(map_in_order(slow_first, range(20), num_workers)) == [i * i for i in range(20)]


def test_a_process_that_is_killed_is_an_error_with_its_remedy() -> None:
    with pytest.raises(UserError, match=r"data=2 processes: One of them was killed.*on fewer cores"):
        list(map_in_order(lambda _: os._exit(1), range(4), 2))
    with pytest.raises(KeyError):
        list(map_in_order(lambda _: {}["a"], range(4), 2))


def test_processes_end_with_the_one_that_started_them() -> None:
    reading, writing = os.pipe()

    def work(_: int) -> None:
        while True:
            os.write(writing, b".")
            time.sleep(0.1)

    process = multiprocessing.get_context("fork").Process(
        target=lambda: list(map_in_order(work, range(2), 2))
    )
    process.start()
    os.read(reading, 1)
    process.kill()
    process.join()
    os.close(writing)
    while os.read(reading, 1 << 16):  # until nobody has the other end
        pass
    os.close(reading)
