"""Prompts whose servers refuse them, go down, or end with them."""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import as_completed
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from data.capture.dispatch import (
    MAX_LOST,
    Completions,
    Dispatcher,
    EngineClient,
    Prompt,
    Refused,
    Unavailable,
)
from data.capture.vllm.server_info import ServerInfo
from eagle31.errors import UserError
from tests.data.capture.vllm.servers import INFO

NUM_PROMPTS = 12
SERVED = replace(INFO, vocab_size=50, max_tokens=20)


class Computer:
    """A server that computes prompts by a function, and is up again when it is asked what it runs."""

    field, remedy = "engines", "start them"

    def __init__(self, name: str, concurrency: int, does: Callable[["Computer", int], None]) -> None:
        self.name, self.concurrency, self.does = name, concurrency, does
        self.under_way = self.most_under_way = self.num_ends = 0
        self.is_down = False

    async def info(self) -> ServerInfo:
        self.is_down = False
        return SERVED

    async def compute(self, prompt: Prompt) -> Completions:
        if self.is_down:
            raise Unavailable("connection refused")
        self.under_way += 1
        self.most_under_way = max(self.under_way, self.most_under_way)
        try:
            await asyncio.sleep(0.001)
            self.does(self, prompt.input_ids[0])
            if self.is_down:
                raise Unavailable("it ended", lost=True)
            return []
        finally:
            self.under_way -= 1

    def end(self) -> None:
        self.is_down = True
        self.num_ends += 1

    async def close(self) -> None:
        pass


def dispatch(
    *servers: EngineClient,
    prompts: list[list[int]] | None = None,
) -> tuple[list[int], dict[int, str]]:
    """Return the answered prompts, in order, and the refused ones."""
    prompts = [[i] for i in range(NUM_PROMPTS)] if prompts is None else prompts
    answered: list[int] = []
    refused: dict[int, str] = {}
    with closing(Dispatcher(servers, lambda *_: None, patience_seconds=0.5)) as dispatcher:
        asked = [Prompt((place,), str(place), input_ids, {}) for place, input_ids in enumerate(prompts)]
        answers = {dispatcher.submit(prompt): place for place, prompt in enumerate(asked)}
        for answer in as_completed(answers):
            try:
                assert answer.result() == []
                answered.append(answers[answer])
            except Refused as error:
                refused[answers[answer]] = str(error)
    return answered, refused


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.capture.dispatch._LONGEST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr("data.capture.dispatch._FIRST_PAUSE_SECONDS", 0.01)


def computes(computer: Computer, token: int) -> None:
    pass


def test_servers_share_the_prompts_and_are_kept_busy() -> None:
    one, two = Computer("one", 2, computes), Computer("two", 3, computes)
    dispatch(one, two)
    assert (one.most_under_way, two.most_under_way) == (2, 3)


def test_a_refused_prompt_is_reported_and_the_others_are_answered() -> None:
    def refuses(computer: Computer, token: int) -> None:
        if token == 3:
            raise Refused("too long")

    answered, refused = dispatch(Computer("one", 4, refuses))
    assert refused == {3: "too long"}
    assert len(answered) == NUM_PROMPTS - 1


def test_a_prompt_that_ends_servers_is_refused_and_no_other() -> None:
    sent = Counter[int]()

    def ends_with_three(computer: Computer, token: int) -> None:
        sent[token] += 1
        if token == 3:
            computer.end()

    servers = [Computer(str(number), 8, ends_with_three) for number in range(2)]
    _, refused = dispatch(*servers, prompts=[[token] for token in range(40)])
    assert list(refused) == [3]
    assert "It was sent 4 times without an answer; at last: it ended" in refused[3]
    assert sum(one.num_ends for one in servers) == sent[3] == MAX_LOST


def test_what_a_server_that_ends_now_and_then_loses_is_sent_again() -> None:
    def ends_sometimes(computer: Computer, token: int) -> None:
        if token % 10 == 0 and computer.num_ends < token // 10:
            computer.end()

    one = Computer("one", 8, ends_sometimes)
    answered, refused = dispatch(one, prompts=[[token] for token in range(40)])
    assert (len(answered), refused, one.num_ends) == (40, {}, 3)


def test_prompts_that_no_server_can_compute_are_not_sent() -> None:
    def computes_all(computer: Computer, token: int) -> None:
        assert token < SERVED.vocab_size

    prompts = [[1], [SERVED.vocab_size], [], [1] * (SERVED.max_tokens + 1), [-1]]
    _, refused = dispatch(Computer("one", 2, computes_all), prompts=prompts)
    assert sorted(refused) == [1, 2, 3, 4]
    assert "more than the 20" in refused[3]


def test_a_server_that_is_set_up_otherwise_ends_the_run() -> None:
    def check(server: object, info: ServerInfo) -> None:
        raise UserError("vllm.servers", "one", "another target")

    with closing(Dispatcher([Computer("one", 2, computes)], check, patience_seconds=0.5)) as dispatcher:
        for key in ("before", "after"):
            with pytest.raises(UserError, match="another target"):
                dispatcher.submit(Prompt((0,), key, [0], {})).result()


def test_servers_that_stay_down_end_the_run() -> None:
    class Down(Computer):
        async def info(self) -> ServerInfo:
            raise Unavailable("nobody there")

    with pytest.raises(UserError, match=r"None has answered .*one: nobody there"):
        dispatch(Down("one", 2, computes))


@pytest.mark.parametrize("num_failures", [MAX_LOST - 1, 1000])
def test_no_prompt_is_left_out_because_the_store_of_torchspec_takes_no_states(num_failures: int) -> None:
    ray = pytest.importorskip("ray")
    from data.capture.torchspec.client import TorchSpecClient

    failures = iter(range(num_failures))

    async def generate(data_id: list[str], **_: Any) -> list[dict[str, str]]:
        if next(failures, None) is not None:
            cause = RuntimeError("async batch_put_from failed: 0_hs (code=-200)")
            raise ray.exceptions.RayTaskError("generate", f"Traceback\nRuntimeError: {cause}", cause)
        return [{"mooncake_key": f"put-{key}"} for key in data_id]

    async def health_check() -> bool:
        return True

    engine = SimpleNamespace(
        generate=SimpleNamespace(remote=generate), health_check=SimpleNamespace(remote=health_check)
    )
    announced: dict[str, str] = {}
    transport: Any = SimpleNamespace(announce=announced.__setitem__)
    client = TorchSpecClient("engine 0", lambda: engine, SERVED, transport, batch_size=2)
    if num_failures < MAX_LOST:
        answered, refused = dispatch(client)
        assert (len(answered), len(announced), refused) == (NUM_PROMPTS, NUM_PROMPTS, {})
        return
    with pytest.raises(UserError, match=r"engine 0, 4 times: raise capture\.spool_gb.*code=-200"):
        dispatch(client)
