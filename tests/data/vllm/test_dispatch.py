"""Prompts whose endpoints refuse them, go down, or end with them."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from data.vllm.capture_request import PARAMS, asks_for_info
from data.vllm.dispatch import Dispatcher, Origin, Prompt
from data.vllm.endpoint import DestinationFailed, Refused, Unavailable
from data.vllm.server_info import ServerInfo
from eagle31.errors import UserError

NUM_PROMPTS = 12
FACTS = ServerInfo("a", "target", None, (1,), 2, 8, "float32", "cpu", vocab_size=50, max_tokens=20, roots=())


class Computer:
    """An endpoint that computes prompts by a function, with each engine in turn, and describes the first.

    An engine that has ended is replaced when the endpoint is described, unless there are several.
    """

    def __init__(
        self,
        name: str,
        concurrency: int,
        compute: Callable[["Computer", int], None],
        *engines: ServerInfo,
    ) -> None:
        self.engines = list(engines or [FACTS])
        self.name, self.concurrency, self.compute = name, concurrency, compute
        self.under_way = self.most_under_way = self.num_starts = 0
        self.is_down = False
        self.failures: list[str] = []  # of destinations

    async def send(self, input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        if asks_for_info(params):
            if self.is_down and len(self.engines) == 1:
                self.engines = [replace(self.engines[0], id=f"{self.name}-{self.num_starts}")]
            self.is_down = False
            self.num_starts += 1
            return self.engines[0].to_json() | {"failures": self.failures}
        if self.is_down:
            raise Unavailable("connection refused")
        self.under_way += 1
        self.most_under_way = max(self.under_way, self.most_under_way)
        await asyncio.sleep(0.001)
        try:
            self.compute(self, input_ids[0])
            if self.is_down:
                raise Unavailable("it ended", lost=True, broken=True)
        finally:
            self.under_way -= 1
        self.engines.append(self.engines.pop(0))
        return {"engine": self.engines[-1].to_json()}

    async def close(self) -> None:
        pass


def dispatch(
    *endpoints: Computer,
    prompts: list[list[int]] | None = None,
    check: Callable[[object, ServerInfo], None] = lambda endpoint, info: None,
    task: dict[str, Any] | None = None,
) -> tuple[list[int], dict[int, str]]:
    """Return the answered prompts, in order, and the refused ones."""
    prompts = [[i] for i in range(NUM_PROMPTS)] if prompts is None else prompts
    answered: list[int] = []
    refused: dict[int, str] = {}

    async def run() -> None:
        dispatcher = Dispatcher(
            endpoints,
            check=check,
            answered=lambda prompt, origin, _: answered.append(prompt.index),
            refused=lambda prompt, reason: refused.update({prompt.index: reason}),
            patience_seconds=0.5,
        )
        for place, input_ids in enumerate(prompts):
            dispatcher.add(Prompt(place, str(place), input_ids, task or {}))
        running = asyncio.create_task(dispatcher.run())
        while not running.done() and len(answered) + len(refused) < len(prompts):
            await asyncio.sleep(0.01)
        if running.done():
            running.result()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())
    assert sorted([*answered, *refused]) == list(range(len(prompts)))
    return answered, refused


def computes(computer: Computer, token: int) -> None:
    pass


def test_endpoints_share_the_prompts_and_are_kept_busy() -> None:
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


def test_what_is_lost_is_sent_again_first() -> None:
    def ends_once(computer: Computer, token: int) -> None:
        if token == 5 and computer.num_starts == 1:
            computer.is_down = True

    one = Computer("one", 1, ends_once)
    assert dispatch(one) == (list(range(NUM_PROMPTS)), {})
    assert one.num_starts == 2


@pytest.mark.parametrize("num_servers", [1, 3])
def test_a_prompt_that_ends_engines_is_set_aside_after_three_of_them(num_servers: int) -> None:
    def ends(computer: Computer, token: int) -> None:
        if token == 2:
            computer.is_down = True

    servers = [Computer(f"s{i}", 4, ends) for i in range(num_servers)]
    _, refused = dispatch(*servers)
    assert list(refused) == [2]
    assert "ended the engine 3 times, even when sent alone" in refused[2]
    assert sum(server.num_starts for server in servers) == num_servers + 3


def test_prompts_that_were_near_another_that_ends_engines_are_answered() -> None:
    """Two clients share a server, and one of them has a prompt that ends it."""
    num_ended = 0

    def ends(computer: Computer, token: int) -> None:
        nonlocal num_ended
        if token == 0 and num_ended < 3:
            num_ended += 1
            computer.is_down = True

    async def send(input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        if not asks_for_info(params) and num_ended < 3 and not one.is_down:
            ends(one, 0)  # whatever this client sends, the other one's prompt is under way as well
        return await real_send(input_ids, params)

    one = Computer("one", 4, computes)
    real_send, one.send = one.send, send  # type: ignore[method-assign]
    assert dispatch(one)[1] == {}
    assert num_ended == 3


def test_what_living_engines_do_not_answer_is_sent_again_and_not_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("data.vllm.dispatch._FIRST_PAUSE_SECONDS", 0.0001)
    monkeypatch.setattr("data.vllm.dispatch._LONGEST_INTERRUPTION_SECONDS", 0.001)
    num_sent = Counter[int]()

    def interrupted(computer: Computer, token: int) -> None:
        num_sent[token] += 1
        if token == 3 or num_sent[token] < 6:
            raise Unavailable("502", lost=True)

    answered, refused = dispatch(Computer("one", 4, interrupted))
    assert sorted(answered) == [i for i in range(NUM_PROMPTS) if i != 3]
    assert "16 times to engines that live" in refused[3]


def test_what_no_engine_can_compute_is_not_sent() -> None:
    one = Computer("one", 2, computes)
    answered, refused = dispatch(one, prompts=[[1], [49], [50], [-1], [], [1] * 20, [1] * 21])
    assert sorted(answered) == [0, 1, 5]
    assert "one outside the target's 50" in refused[2]
    assert "more than the 20" in refused[6]


@pytest.mark.parametrize("answered", [False, True])
def test_a_destination_that_fails_ends_the_client_with_the_reason(answered: bool) -> None:
    def fails(computer: Computer, token: int) -> None:
        if token == 5:
            computer.failures = ["the disk is full"]
            if not answered:
                raise DestinationFailed("the disk is full")
            computer.is_down = True  # so that the client asks for the server info

    one = Computer("one", 1, fails)
    with pytest.raises(UserError, match=r"vllm.servers=one: .*write the states: the disk is full"):
        dispatch(one)


def test_a_dispatcher_names_itself_in_all_its_requests() -> None:
    clients: list[str] = []

    class Noting(Computer):
        async def send(self, input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
            clients.append(params[PARAMS]["client"])
            return await super().send(input_ids, params)

    for _ in range(2):
        dispatch(Noting("one", 1, computes), prompts=[[1], [2]], task={PARAMS: {"key": "7"}})
    assert [len(set(clients[:3])), len(set(clients[3:])), len(set(clients)), len(clients)] == [1, 1, 2, 6]


def test_an_engine_after_a_load_balancer_is_lost_once_it_is_silent_after_a_failure() -> None:
    def ends_once(computer: Computer, token: int) -> None:
        computer.is_down = token == 9

    first, second, third = (replace(FACTS, id=name) for name in "abc")
    one = Computer("one", 1, ends_once, first, second)
    origins: dict[str, Origin] = {}

    async def run() -> None:
        dispatcher = Dispatcher(
            [one],
            check=lambda endpoint, facts: None,
            answered=lambda prompt, origin, _: origins.update({origin.engine: origin}),
            refused=lambda prompt, reason: None,
            patience_seconds=0.5,
        )
        running = asyncio.create_task(dispatcher.run())

        async def compute(index: int, token: int, *answering: str) -> None:
            dispatcher.add(Prompt(index, str(index), [token], {}))
            while not running.done() and not set(answering) <= origins.keys():
                await asyncio.sleep(0.01)

        # Whichever engine described itself, both are alive.
        await compute(0, 1, "a")
        await compute(1, 1, "a", "b")
        assert [dispatcher.is_lost(origins[name]) for name in "ab"] == [False, False]
        one.engines = [first, third]  # the second has ended, and the balancer has another one
        await compute(2, 9)
        while one.num_starts < 2:
            await asyncio.sleep(0.01)
        assert dispatcher.is_lost(origins["b"])
        await compute(3, 1)
        await compute(4, 1, "c")
        assert [dispatcher.is_lost(origins[name]) for name in "abc"] == [False, True, False]
        dispatcher.give_up(origins["c"])
        assert dispatcher.is_lost(origins["c"])
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())


def test_an_engine_that_ended_without_a_request_under_way_is_lost_once_it_is_doubted() -> None:
    one = Computer("one", 1, computes, FACTS)
    origins: list[Origin] = []

    async def run() -> None:
        dispatcher = Dispatcher(
            [one],
            check=lambda endpoint, facts: None,
            answered=lambda prompt, origin, _: origins.append(origin),
            refused=lambda prompt, reason: None,
            patience_seconds=0.5,
        )
        running = asyncio.create_task(dispatcher.run())

        async def until(happened: Callable[[], bool]) -> None:
            while not running.done() and not happened():
                await asyncio.sleep(0.01)

        dispatcher.add(Prompt(0, "0", [1], {}))
        await until(lambda: bool(origins))
        num_looks = one.num_starts
        dispatcher.doubt(origins[0])
        await until(lambda: one.num_starts > num_looks)
        assert not dispatcher.is_lost(origins[0]), "it still answers"
        one.engines = [replace(FACTS, id="b")]
        dispatcher.doubt(origins[0])
        await until(lambda: dispatcher.is_lost(origins[0]))
        dispatcher.add(Prompt(1, "1", [1], {}))
        await until(lambda: len(origins) == 2)
        assert [(one.engine, dispatcher.is_lost(one)) for one in origins] == [("a", True), ("b", False)]
        assert dispatcher.links[0].num_failures == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())


def test_every_engine_after_a_load_balancer_is_checked() -> None:
    def check(endpoint: object, info: ServerInfo) -> None:
        if info.id == "b":
            raise UserError("vllm.servers", "one", "It has another target.")

    one = Computer("one", 1, computes, FACTS, replace(FACTS, id="b"))
    with pytest.raises(UserError, match="another target"):
        dispatch(one, check=check)


def test_endpoints_that_stay_down_are_named() -> None:
    async def away(input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        raise Unavailable("connection refused")

    one, two = Computer("one", 1, computes), Computer("two", 1, computes)
    one.send = two.send = away  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"'one', 'two'.*one: connection refused; two: connection refused"):
        dispatch(one, two)
