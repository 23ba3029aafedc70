"""The dispatcher, which keeps any number of engines busy with prompts and survives their failures."""

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from data.sampling import Sampling
from eagle31.errors import UserError

PATIENCE_SECONDS = 300.0  # time to start a server again and load its model
MAX_LOST = 4  # a prompt that got no answer so often is refused
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 5.0
_LONGEST_RETRY_SECONDS = 30.0


class Unavailable(Exception):
    """The engine does not answer now.

    Attributes:
        lost: the prompt had been sent, and may have ended the engine.
    """

    def __init__(self, reason: str, lost: bool = False) -> None:
        super().__init__(reason)
        self.lost = lost


class Refused(Exception):
    """The engine will never answer this prompt."""


Completions = list[list[int]]  # as many as were requested: one, or none where states are captured


@dataclass(eq=False)
class Prompt:
    """A prompt for an engine.

    order: low ones are sent first.
    task: how to sample a completion, or what the client needs to have states captured.
    num_lost: the number of times that it was sent and got no answer.
    answer: from an engine, or Refused. Once it is cancelled, the prompt is not sent any more.
    """

    order: tuple[int, ...]
    key: str
    input_ids: list[int]
    task: Any
    num_lost: int = 0
    answer: Future[Completions] = field(default_factory=Future)


@dataclass(frozen=True)
class EngineInfo:
    """What the dispatcher has to know of an engine."""

    vocab_size: int
    max_tokens: int  # the longest prompt that is captured, or prompt and completion together


class EngineClient(Protocol):
    """A connection to an engine."""

    name: str
    concurrency: int  # the number of prompts under way
    field: str  # the setting that an error names
    remedy: str  # what helps where no engine answers

    async def info(self) -> EngineInfo:
        """Return what the engine runs; raise Unavailable where it does not answer."""
        ...

    async def compute(self, prompt: Prompt) -> Completions:
        """Return the answer to the prompt; raise Unavailable or Refused."""
        ...

    async def close(self) -> None: ...


@dataclass
class _Link:
    """An engine, and whether it is up."""

    client: EngineClient
    info: EngineInfo | None = None
    down_since: float | None = field(default_factory=time.monotonic)
    reason: str = "not reached yet"
    up: asyncio.Event = field(default_factory=asyncio.Event)
    # Held by the one prompt under way there that was lost more than once: what ends servers meets no other.
    suspect: asyncio.Lock = field(default_factory=asyncio.Lock)


class Dispatcher:
    """Sends prompts to any server with capacity, from a thread, and sends those again that get no answer.

    A prompt is refused where the server says so, and after four times without an answer. Of the prompts that
    were lost twice, a server has one at a time. So a prompt that ends servers is refused, and those that were
    under way with it are not.

    Args:
        clients: used by this object only, which closes them.
        check: raises UserError for a client's engine whose info is not as required.
        patience_seconds: how long all servers may be down at once.
    """

    def __init__(
        self, clients: Sequence[EngineClient], check: Callable[[Any, Any], None], patience_seconds: float
    ) -> None:
        self.patience_seconds = patience_seconds
        self.num_failures = 0  # the number of times that a server went down
        self._links = [_Link(client) for client in clients]
        self._check = check
        self._prompts: asyncio.PriorityQueue[tuple[Any, ...]] = asyncio.PriorityQueue()
        self._added = itertools.count()  # makes every item of the queue differ before its prompt
        self._open: set[Prompt] = set()  # without an answer
        self._failure: Exception | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engines", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._run(), self._loop)

    def submit(self, prompt: Prompt) -> Future[Completions]:
        """Send a prompt as soon as there is room, and return its answer: those never lost first, by order.

        The answer raises Refused, or UserError where a server is not set up as required, or none has been up
        for too long.
        """
        self._loop.call_soon_threadsafe(self._add, prompt)
        return prompt.answer

    def close(self) -> None:
        """Cancel what is under way, close the clients, and end the thread."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in self._links:
            await link.client.close()

    async def _run(self) -> None:
        tasks = [asyncio.create_task(self._keep_up(link)) for link in self._links]
        for link in self._links:
            tasks += [asyncio.create_task(self._work(link)) for _ in range(link.client.concurrency)]
        try:
            await asyncio.gather(*tasks)
        except Exception as error:  # every prompt that waits raises it
            self._failure = error
            for prompt in [*self._open]:
                self._settle(prompt, error)
        finally:
            for task in tasks:
                task.cancel()

    def _add(self, prompt: Prompt) -> None:
        self._open.add(prompt)
        if self._failure is not None:
            self._settle(prompt, self._failure)
        else:
            self._prompts.put_nowait((prompt.num_lost, prompt.order, next(self._added), prompt))

    def _settle(self, prompt: Prompt, answer: Completions | Exception) -> None:
        self._open.discard(prompt)
        with suppress(InvalidStateError):  # it was cancelled
            if isinstance(answer, Exception):
                prompt.answer.set_exception(answer)
            else:
                prompt.answer.set_result(answer)

    async def _keep_up(self, link: _Link) -> None:
        """Look at a server that is down until it is up."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            if link.up.is_set():
                pause = _FIRST_PAUSE_SECONDS
            else:
                try:
                    link.info = await link.client.info()
                except Unavailable as error:
                    link.reason = str(error)
                    self._check_patience()
                else:
                    self._check(link.client, link.info)
                    link.down_since = None
                    link.up.set()
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _work(self, link: _Link) -> None:
        while True:
            await link.up.wait()
            *_, prompt = await self._prompts.get()
            if prompt.answer.cancelled():
                self._open.discard(prompt)
                continue
            if not link.up.is_set():
                self._add(prompt)
                continue
            assert link.info is not None
            reason = _impossible(prompt, link.info)
            if reason is not None:
                self._settle(prompt, Refused(reason))
                continue
            try:
                async with link.suspect if prompt.num_lost > 1 else nullcontext():
                    self._settle(prompt, await link.client.compute(prompt))
            except Refused as error:
                self._settle(prompt, error)
            except Unavailable as error:
                self._note_failure(link, prompt, error)

    def _note_failure(self, link: _Link, prompt: Prompt, error: Unavailable) -> None:
        if link.up.is_set():
            link.up.clear()
            link.down_since = time.monotonic()
            self.num_failures += 1
        link.reason = str(error)
        prompt.num_lost += error.lost
        if prompt.num_lost >= MAX_LOST:
            reason = f"It was sent {prompt.num_lost} times without an answer; at last: {error}"
            self._settle(prompt, Refused(reason))
            return
        pause = min(2.0**prompt.num_lost - 1.0, _LONGEST_RETRY_SECONDS)
        asyncio.get_running_loop().call_later(pause, self._add, prompt)

    def _check_patience(self) -> None:
        since = [link.down_since for link in self._links if link.down_since is not None]
        if len(since) < len(self._links) or time.monotonic() - max(since) < self.patience_seconds:
            return
        client = self._links[0].client
        reasons = "; ".join(f"{link.client.name}: {link.reason}" for link in self._links)
        remedy = (
            f"None has answered for {self.patience_seconds:.0f} seconds ({reasons}); {client.remedy} and run "
            "the same command again: finished work is kept."
        )
        raise UserError(client.field, [link.client.name for link in self._links], remedy)


def _impossible(prompt: Prompt, info: EngineInfo) -> str | None:
    """Return why an engine cannot compute a prompt, or None. Some of these would end it."""
    largest = max(prompt.input_ids, default=-1)
    if not 0 <= min(prompt.input_ids, default=-1) <= largest < info.vocab_size:
        return f"It has no tokens, or one outside the target's {info.vocab_size}: {largest}."
    new_tokens = prompt.task.max_new_tokens if isinstance(prompt.task, Sampling) else 0
    if len(prompt.input_ids) + new_tokens > info.max_tokens:
        tokens = f"{len(prompt.input_ids)} tokens" + (
            f" and {new_tokens} of its answer" if new_tokens else ""
        )
        return f"Its {tokens} are more than the {info.max_tokens} that the engine was started for."
    return None
