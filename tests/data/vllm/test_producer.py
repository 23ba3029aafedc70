"""The producer's end, where servers still compute and write."""

import asyncio
import time
from contextlib import closing
from typing import Any

import pytest
import torch

from data.transport.protocol import StateRequest
from data.vllm.capture_request import asks_for_info
from data.vllm.producer import VllmProducer
from tests.data.vllm.test_dispatch import FACTS

CONCURRENCY = 2
COMPUTE_SECONDS = WRITE_SECONDS = 0.2


class Written:
    """A transport in which states arrive some time after their request was answered, or never."""

    def __init__(self, loses: bool) -> None:
        self.loses = loses
        self.answered: dict[str, float] = {}

    def to_json(self) -> dict[str, Any]:
        return {}

    def arrived(self, key: str) -> bool:
        return not self.loses and time.monotonic() > self.answered.get(key, 1e18) + WRITE_SECONDS


class Server:
    """An endpoint that answers some time after it was asked."""

    name, concurrency = "one", CONCURRENCY

    def __init__(self, written: Written) -> None:
        self.written, self.num_sent = written, 0

    async def send(self, input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        if asks_for_info(params):
            return FACTS.to_json()
        self.num_sent += 1
        await asyncio.sleep(COMPUTE_SECONDS)
        self.written.answered[f"key-{input_ids[0]}"] = time.monotonic()
        return {"engine": FACTS.to_json()}

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("loses", [False, True])
def test_at_the_end_what_was_sent_for_comes_and_nothing_more_is_sent(loses: bool) -> None:
    written = Written(loses)
    server: Any = Server(written)
    transport: Any = written
    with closing(VllmProducer([server], transport, lambda endpoint, info: None, 60.0)) as producer:
        for number in range(8):
            producer.request(StateRequest(f"key-{number}", torch.tensor([number, 1]), torch.ones(2).bool()))
        while server.num_sent < CONCURRENCY:
            time.sleep(0.01)
        begun = time.monotonic()
        producer.finish(1.0 if loses else 60.0)
        seconds = time.monotonic() - begun
    assert server.num_sent == CONCURRENCY
    assert [written.arrived(f"key-{number}") for number in range(CONCURRENCY)] == [not loses] * CONCURRENCY
    assert (seconds >= 1.0) == loses
