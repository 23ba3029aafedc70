"""Keeps any number of endpoints busy with prompts, whatever becomes of some of them."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from data.sampling import Sampling
from data.vllm.endpoint import Endpoint, Refused, Unavailable, describe
from data.vllm.server_info import ServerInfo, read_info
from eagle31.errors import UserError

PATIENCE_SECONDS = 300.0  # servers are started again, and load their model
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 5.0
# A prompt that was lost so often with others is sent alone, and if it is then lost so often, never again.
_LOST_IN_COMPANY, _LOST_ALONE = 2, 2


@dataclass(order=True)
class Prompt:
    """What is to be computed; the lower `place` first.

    asked: of the connector, or how to answer it.
    """

    place: int
    key: str = field(compare=False)
    input_ids: list[int] = field(compare=False)
    asked: dict[str, Any] | Sampling = field(compare=False)
    num_losses: int = field(default=0, compare=False)


class Link:
    """The way to an endpoint: whether it is there, and how many prompts are under way."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.facts: ServerInfo | None = None
        self.down_since: float | None = time.monotonic()
        self.reason = "not reached yet"
        self.num_failures = 0
        self._up = asyncio.Event()
        self._exclusive = asyncio.Lock()
        self._under_way = 0
        self._idle = asyncio.Condition()

    @property
    def is_up(self) -> bool:
        return self._up.is_set()

    async def until_up(self) -> None:
        await self._up.wait()

    def went_up(self, facts: ServerInfo) -> None:
        self.facts, self.down_since = facts, None
        self._up.set()

    def went_down(self, reason: str) -> None:
        if self.is_up:
            self._up.clear()
            self.down_since = time.monotonic()
            self.num_failures += 1
        self.reason = reason

    @contextlib.asynccontextmanager
    async def turn(self, alone: bool) -> AsyncIterator[None]:
        """Among the others, or while none is under way."""
        async with self._exclusive:
            if alone:
                async with self._idle:
                    await self._idle.wait_for(lambda: self._under_way == 0)
                yield
                return
            self._under_way += 1
        try:
            yield
        finally:
            async with self._idle:
                self._under_way -= 1
                self._idle.notify_all()


class Dispatcher:
    """Sends prompts to whatever endpoint has room; one that is lost with its endpoint is sent again.

    Args:
        check: raises UserError for an endpoint that is set up in another way than is needed.
        answered: called with the prompt, the id of the engine that computed it, and the answer's token ids
            where one was asked for.
        refused: called with the prompt and the reason.
        patience_seconds: how long all endpoints may be away at once.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        check: Callable[[Endpoint, ServerInfo], None],
        answered: Callable[[Prompt, str, list[int]], None],
        refused: Callable[[Prompt, str], None],
        patience_seconds: float,
    ) -> None:
        self.links = [Link(endpoint) for endpoint in endpoints]
        self.patience_seconds = patience_seconds
        self._check, self._answered, self._refused = check, answered, refused
        self._prompts: asyncio.PriorityQueue[Prompt] = asyncio.PriorityQueue()

    def add(self, prompt: Prompt) -> None:
        self._prompts.put_nowait(prompt)

    @property
    def num_waiting(self) -> int:
        return self._prompts.qsize()

    @property
    def engines(self) -> set[str]:
        """The ids of those that are there."""
        return {link.facts.id for link in self.links if link.is_up and link.facts is not None}

    async def run(self) -> None:
        """Until it is cancelled.

        Raises:
            UserError: an endpoint is set up wrongly, or none has been there for too long.
        """
        tasks = [asyncio.create_task(self._keep_up(link)) for link in self.links]
        for link in self.links:
            tasks += [asyncio.create_task(self._work(link)) for _ in range(link.endpoint.concurrency)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def look(self, link: Link) -> None:
        """Finds out whether the endpoint is there, and still the same engine.

        Raises:
            UserError: it is set up wrongly, or has ended and said why.
        """
        _raise_failure(link)
        try:
            facts = await describe(link.endpoint)
        except Unavailable as error:
            link.went_down(str(error))
            return
        except Refused as error:
            raise UserError("vllm.servers", link.endpoint.name, str(error)) from error
        self._check(link.endpoint, facts)
        link.went_up(facts)

    async def _keep_up(self, link: Link) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while True:
            if link.is_up:
                pause = _FIRST_PAUSE_SECONDS
                await asyncio.sleep(_FIRST_PAUSE_SECONDS)
                continue
            await self.look(link)
            if not link.is_up:
                self._check_patience()
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _work(self, link: Link) -> None:
        while True:
            await link.until_up()
            prompt = await self._prompts.get()
            if not link.is_up:
                self.add(prompt)
                continue
            assert link.facts is not None
            reason = _impossible(prompt, link.facts)
            if reason is not None:
                self._refused(prompt, reason)
                continue
            try:
                async with link.turn(alone=prompt.num_losses >= _LOST_IN_COMPANY):
                    output_ids = await _compute(link.endpoint, prompt)
                self._answered(prompt, link.facts.id, output_ids)
            except Refused as error:
                self._refused(prompt, str(error))
            except Unavailable as error:
                link.went_down(str(error))
                prompt.num_losses += error.lost
                if prompt.num_losses >= _LOST_IN_COMPANY + _LOST_ALONE:
                    self._refused(prompt, f"Sent alone, it ended the engine: {error}")
                else:
                    self.add(prompt)

    def _check_patience(self) -> None:
        since = [link.down_since for link in self.links if link.down_since is not None]
        if len(since) < len(self.links) or time.monotonic() - max(since) < self.patience_seconds:
            return
        told = "; ".join(f"{link.endpoint.name}: {link.reason}" for link in self.links)
        remedy = (
            f"None has answered for {self.patience_seconds:.0f} seconds ({told}); start them with "
            "scripts/serve_target and give the same command again: what is finished is kept."
        )
        raise UserError("vllm.servers", [link.endpoint.name for link in self.links], remedy)


async def _compute(endpoint: Endpoint, prompt: Prompt) -> list[int]:
    if isinstance(prompt.asked, Sampling):
        return await endpoint.generate(prompt.input_ids, prompt.asked)
    await endpoint.send(prompt.input_ids, prompt.asked)
    return []


def _impossible(prompt: Prompt, facts: ServerInfo) -> str | None:
    """Why an engine cannot compute a prompt, if so; it ends with some of these instead of refusing them."""
    largest = max(prompt.input_ids, default=-1)
    if not 0 <= min(prompt.input_ids, default=-1) <= largest < facts.vocab_size:
        return f"Has no tokens, or others than the target's {facts.vocab_size}: {largest}."
    answer = prompt.asked.max_new_tokens if isinstance(prompt.asked, Sampling) else 0
    if len(prompt.input_ids) + answer > facts.max_tokens:
        tokens = f"{len(prompt.input_ids)} tokens" + (f" and {answer} of its answer" if answer else "")
        return f"Its {tokens} are more than the {facts.max_tokens} that vLLM was started for."
    return None


def _raise_failure(link: Link) -> None:
    """Where an engine wrote down why it had to end, another start would end in the same way."""
    if link.facts is None:
        return
    for root in link.facts.roots:
        left = read_info(root, link.facts.id)
        if left is not None and left.failure is not None:
            remedy = f"It ended, and says why: {left.failure} What is finished is kept."
            raise UserError("vllm.servers", link.endpoint.name, remedy)
