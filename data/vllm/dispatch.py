"""The dispatcher, which keeps any number of endpoints busy with prompts and survives their failures."""

import asyncio
import contextlib
import math
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from data.sampling import Sampling
from data.vllm.capture_request import with_client
from data.vllm.endpoint import DestinationFailed, Endpoint, Refused, Unavailable, describe
from data.vllm.server_info import ServerInfo
from eagle31.errors import UserError

PATIENCE_SECONDS = 300.0  # time to start a server again and load its model
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 5.0
# A prompt that was lost this often with others is sent alone. If it is then lost this often, it is refused.
_LOST_IN_COMPANY, _LOST_ALONE = 2, 2


@dataclass(order=True)
class Prompt:
    """A prompt for vLLM. Prompts with a lower `index` go first.

    task: the connector's parameters, or how to sample a completion.
    """

    index: int
    key: str = field(compare=False)
    input_ids: list[int] = field(compare=False)
    task: dict[str, Any] | Sampling = field(compare=False)
    num_losses: int = field(default=0, compare=False)


class Link:
    """The state of an endpoint: whether it is up, and how many prompts are under way."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.info: ServerInfo | None = None
        self.down_since: float | None = time.monotonic()
        self.reason = "not reached yet"
        self.num_failures = 0
        self.failed_at = -math.inf  # when it went down last
        self.engines: dict[str, ServerInfo] = {}  # that it has reached, by id
        self._up = asyncio.Event()
        self._exclusive = asyncio.Lock()
        self._under_way = 0
        self._idle = asyncio.Condition()

    @property
    def is_up(self) -> bool:
        return self._up.is_set()

    async def until_up(self) -> None:
        await self._up.wait()

    def went_up(self, info: ServerInfo) -> None:
        self.info, self.down_since = info, None
        self.engines[info.id] = info
        self._up.set()

    def went_down(self, reason: str) -> None:
        if self.is_up:
            self._up.clear()
            self.down_since = self.failed_at = time.monotonic()
            self.num_failures += 1
        self.reason = reason

    @contextlib.asynccontextmanager
    async def turn(self, alone: bool) -> AsyncIterator[None]:
        """Take a turn to send a prompt; with `alone`, while no other prompt is under way."""
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


@dataclass(frozen=True)
class Origin:
    """Where an answer came from: the id of the engine that computed it, and the endpoint that led to it.

    There may be several engines at one address: data parallel ones, or those of a load balancer.
    """

    engine: str
    link: Link


class Dispatcher:
    """Sends prompts to any endpoint with capacity, and sends those again that are lost with their endpoint.

    Args:
        check: raises UserError for an engine that is not set up as required.
        answered: called with the prompt, where its answer came from, and the completion's token ids where one
            was requested.
        refused: called with the prompt and the reason.
        patience_seconds: how long all endpoints may be down at once.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        check: Callable[[Endpoint, ServerInfo], None],
        answered: Callable[[Prompt, Origin, list[int]], None],
        refused: Callable[[Prompt, str], None],
        patience_seconds: float,
    ) -> None:
        self.links = [Link(endpoint) for endpoint in endpoints]
        self.patience_seconds = patience_seconds
        self._check, self._answered, self._refused = check, answered, refused
        self._client = secrets.token_hex(8)
        self._prompts: asyncio.PriorityQueue[Prompt] = asyncio.PriorityQueue()
        self._heard_at: dict[str, float] = {}  # when each engine answered last

    def add(self, prompt: Prompt) -> None:
        self._prompts.put_nowait(prompt)

    def is_lost(self, origin: Origin) -> bool:
        """Return whether an engine may have ended before it wrote the states of what it had answered.

        That is so once its endpoint has gone down, until the engine answers again. An engine that another one
        hides, after a load balancer, is not lost.
        """
        return self._heard_at.get(origin.engine, -math.inf) <= origin.link.failed_at

    def give_up(self, origin: Origin) -> None:
        """Count an engine as lost whose states have not come."""
        self._heard_at.pop(origin.engine, None)

    async def run(self) -> None:
        """Send prompts until this is cancelled.

        Raises:
            UserError: an endpoint is not set up as required or could not write what it was sent, or none has
                been up for too long.
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
        """Find out whether the endpoint is up and which engine it is.

        Raises:
            UserError: it is not set up as required, or could not write what this dispatcher had sent.
        """
        try:
            info = await describe(link.endpoint, self._client, flush=True)
        except Unavailable as error:
            link.went_down(str(error))
            return
        except DestinationFailed as error:
            raise _not_written(link, error) from error
        except Refused as error:
            raise UserError("vllm.servers", link.endpoint.name, str(error)) from error
        self._note_engine(link, info)
        link.went_up(info)

    def _note_engine(self, link: Link, info: ServerInfo) -> None:
        if info.id not in link.engines:
            self._check(link.endpoint, info)
            link.engines[info.id] = info
        self._heard_at[info.id] = time.monotonic()

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
            assert link.info is not None
            reason = _impossible(prompt, link.info)
            if reason is not None:
                self._refused(prompt, reason)
                continue
            try:
                async with link.turn(alone=prompt.num_losses >= _LOST_IN_COMPANY):
                    info, output_ids = await self._compute(link.endpoint, prompt)
                info = info or link.info
                self._note_engine(link, info)
                self._answered(prompt, Origin(info.id, link), output_ids)
            except DestinationFailed as error:
                raise _not_written(link, error) from error
            except Refused as error:
                self._refused(prompt, str(error))
            except Unavailable as error:
                link.went_down(str(error))
                prompt.num_losses += error.lost
                if prompt.num_losses >= _LOST_IN_COMPANY + _LOST_ALONE:
                    self._refused(prompt, f"It ended the engine, even when sent alone: {error}")
                else:
                    self.add(prompt)

    async def _compute(self, endpoint: Endpoint, prompt: Prompt) -> tuple[ServerInfo | None, list[int]]:
        """Return the info of the engine that computed a prompt, if it tells, and the completion."""
        if isinstance(prompt.task, Sampling):
            return None, await endpoint.generate(prompt.input_ids, prompt.task)
        answer = await endpoint.send(prompt.input_ids, with_client(prompt.task, self._client))
        return ServerInfo.from_json(answer["engine"]) if "engine" in answer else None, []

    def _check_patience(self) -> None:
        since = [link.down_since for link in self.links if link.down_since is not None]
        if len(since) < len(self.links) or time.monotonic() - max(since) < self.patience_seconds:
            return
        reasons = "; ".join(f"{link.endpoint.name}: {link.reason}" for link in self.links)
        remedy = (
            f"No server has answered for {self.patience_seconds:.0f} seconds ({reasons}); start them with "
            "scripts/serve_target and run the same command again: finished work is kept."
        )
        raise UserError("vllm.servers", [link.endpoint.name for link in self.links], remedy)


def _not_written(link: Link, error: DestinationFailed) -> UserError:
    remedy = f"It could not write the states: {error} Finished work is kept."
    return UserError("vllm.servers", link.endpoint.name, remedy)


def _impossible(prompt: Prompt, info: ServerInfo) -> str | None:
    """Return why an engine cannot compute a prompt, or None. Some of these would end it."""
    largest = max(prompt.input_ids, default=-1)
    if not 0 <= min(prompt.input_ids, default=-1) <= largest < info.vocab_size:
        return f"It has no tokens, or one outside the target's {info.vocab_size}: {largest}."
    new_tokens = prompt.task.max_new_tokens if isinstance(prompt.task, Sampling) else 0
    if len(prompt.input_ids) + new_tokens > info.max_tokens:
        tokens = f"{len(prompt.input_ids)} tokens" + (
            f" and {new_tokens} of its answer" if new_tokens else ""
        )
        return f"Its {tokens} are more than the {info.max_tokens} that vLLM was started for."
    return None
