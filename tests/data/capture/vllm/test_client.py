"""What a client sends to a server at a time, and an answer that a server cuts off."""

import asyncio
import json

import httpx
import pytest

from data.capture.dispatch import Unavailable
from data.capture.vllm.client import VllmClient
from data.capture.vllm.server_info import INFO_PATH
from data.sampling import Sampling
from tests.data.capture.vllm.servers import INFO


def test_no_more_is_under_way_than_the_cache_and_what_waits_for_it() -> None:
    under_way, most = 0, []

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal under_way
        if request.url.path == INFO_PATH:
            return httpx.Response(200, json=INFO.to_json())  # a cache of 1,000 tokens
        size = len(json.loads(request.content)["prompt"])
        under_way += size
        most.append(under_way)
        for _ in range(50):  # whatever else may come has come
            await asyncio.sleep(0)
        under_way -= size
        return httpx.Response(200, json={"choices": []})

    async def send() -> None:
        client = VllmClient("http://server", 16, num_sharing=2)
        client._client = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://server")
        await client.info()
        prompts = [[0] * length for length in (2500, *[450] * 20)]
        await asyncio.gather(*(client.capture(prompt, {}) for prompt in prompts))
        await client.close()

    asyncio.run(send())
    assert max(most) == 2500  # alone
    assert max(most[1:]) == 2 * 450
    assert len(most) == 21


@pytest.mark.parametrize("writes", [True, False])
def test_a_prompt_that_a_server_aborts_when_it_ends_is_to_be_sent_again(writes: bool) -> None:
    """vLLM answers it with status 200, for example when another of its engines has died."""

    def answer(request: httpx.Request) -> httpx.Response:
        choice = {"finish_reason": "abort", "text": "", "token_ids": None}
        return httpx.Response(200, json={"choices": [choice], "kv_transfer_params": None})

    async def send() -> None:
        client = VllmClient("http://server", 1)
        client._client = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://server")
        with pytest.raises(Unavailable) as raised:
            await (
                client.generate([1], Sampling(4, (2,), 0.0, 0)) if writes else client.capture([1], {"a": 1})
            )
        assert raised.value.lost
        await client.close()

    asyncio.run(send())
