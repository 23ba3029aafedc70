import multiprocessing
import os
import time

import pytest

from data.conversations.masks import render
from data.conversations.schemas import Conversation
from data.conversations.template import TemplateRefused, surviving
from data.conversations.workers import ProcessKilled, isolated, map_in_order
from tests.data.conversations.chat_templates import byte_level_tokenizer

CONVERSATION = Conversation("a", ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}))


@pytest.mark.parametrize("num_workers", [1, 3])
def test_results_are_in_the_order_of_the_chunks(num_workers: int) -> None:
    def slow_first(chunk: int) -> int:
        time.sleep(0.05 if chunk == 0 else 0)
        return chunk * chunk

    assert list(map_in_order(slow_first, range(20), num_workers)) == [i * i for i in range(20)]


def test_a_process_that_is_killed_or_takes_too_long_is_an_error() -> None:
    with pytest.raises(ProcessKilled):
        isolated(lambda: os._exit(1))
    with pytest.raises(ProcessKilled, match="more than"):
        isolated(lambda: time.sleep(600), seconds=0.2)
    with pytest.raises(ProcessKilled):
        list(map_in_order(lambda _: os._exit(1), range(4), 2))
    with pytest.raises(KeyError):
        isolated(lambda: {}["a"])


def test_processes_end_with_the_one_that_started_them() -> None:
    reading, writing = os.pipe()

    def work(_: int) -> None:
        while True:
            os.write(writing, b".")
            time.sleep(0.1)

    for run in (lambda: list(map_in_order(work, range(2), 2)), lambda: isolated(lambda: work(0))):
        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        os.read(reading, 1)
        process.kill()
        process.join()
    os.close(writing)
    while os.read(reading, 1 << 16):  # until nobody has the other end
        pass
    os.close(reading)


def rendered(source: str, seconds: float = 60.0) -> object:
    tokenizer = byte_level_tokenizer(source)
    with surviving(tokenizer):
        return isolated(
            lambda: render(tokenizer, CONVERSATION, template_kwargs={}, eos_token_ids={0}), seconds
        )


@pytest.mark.parametrize(
    "source",
    ["{{ 'x' * 10 ** 10 }}", "{{ (messages * 10 ** 9) | join }}", "{{ messages.append(1) }}", "{% banana %}"],
)
def test_a_template_that_takes_all_memory_or_leaves_its_sandbox_is_refused(source: str) -> None:
    with pytest.raises(TemplateRefused) as caught:
        rendered(source)
    assert caught.value.field == "target.chat_template"
