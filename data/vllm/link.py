"""The state of an endpoint, and which prompts were under way when its engine may have ended."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from data.sampling import Sampling
from data.vllm.endpoint import Endpoint, Unavailable
from data.vllm.server_info import ServerInfo

# A prompt that was under way when an engine ended is sent alone from then on. A prompt with which so many
# engines ended, and so many of them while it was alone, is refused.
_MAX_ENDED, _MAX_ENDED_ALONE = 3, 2


@dataclass
class Prompt:
    """A prompt for vLLM.

    task: the connector's parameters, or how to sample a completion.
    num_ended: the number of engines that have ended while it was under way, with others or alone.
    num_unexplained: the number of times that it got no answer and nobody knows yet whether the engine ended.
    num_interrupted: the number of times that it got no answer from an engine that lives.
    withdrawn: it is not to be sent again.
    """

    index: int
    key: str
    input_ids: list[int]
    task: dict[str, Any] | Sampling
    num_ended: int = 0
    num_ended_alone: int = 0
    num_unexplained: int = 0
    num_interrupted: int = 0
    withdrawn: bool = False

    @property
    def rank(self) -> tuple[bool, int, int]:
        """The rank in the queue: first what was lost, and among that the prompts that have done least harm.

        Another client's prompt may be what ends a server that several share. Prompts that take turns in being
        sent alone are not all blamed for it.
        """
        return not self.is_suspect, self.num_ended + self.num_unexplained, self.index

    @property
    def is_suspect(self) -> bool:
        """Whether an engine has ended, or may have ended, while this prompt was under way."""
        return self.num_ended + self.num_unexplained > 0

    @property
    def ends_engines(self) -> bool:
        return self.num_ended >= _MAX_ENDED and self.num_ended_alone >= _MAX_ENDED_ALONE

    @property
    def awaits_explanation(self) -> bool:
        """Whether it has done too much harm to be sent again, if all that is unexplained is its fault."""
        return self.num_unexplained > 0 and self.num_ended + self.num_unexplained >= _MAX_ENDED


@dataclass(frozen=True)
class _Loss:
    """A prompt that got no answer."""

    prompt: Prompt
    alone: bool
    broken: bool  # the server broke off, rather than a proxy or a time limit


class Link:
    """The state of an endpoint: whether it is up, and how many prompts are under way."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.info: ServerInfo | None = None
        self.down_since: float | None = time.monotonic()
        self.doubted = False  # whether it is to be looked at although it is up
        self.reason = "not reached yet"
        self.num_failures = 0
        self.failed_at = -math.inf  # when it went down last
        self.engines: dict[str, ServerInfo] = {}  # that it has reached, by id
        self._recent: set[str] = set()  # the engines that have answered since it went up
        self._losses: list[_Loss] = []  # unexplained
        self._up = asyncio.Event()
        self._exclusive = asyncio.Lock()
        self._under_way = 0
        self._idle = asyncio.Condition()

    @property
    def is_up(self) -> bool:
        return self._up.is_set()

    async def until_up(self) -> None:
        await self._up.wait()

    def note_engine(self, info: ServerInfo) -> None:
        """Note that an engine has answered."""
        self.engines[info.id] = info
        self._recent.add(info.id)

    def went_up(self, info: ServerInfo) -> None:
        """Note the engine that answers first after a failure, which shows whether the last one has ended."""
        if not self.is_up:
            is_new, several = info.id not in self.engines, len(self._recent) > 1
            self.explain_losses(lambda loss: loss.broken if several else is_new)
            self._recent = set()
        self.info, self.down_since = info, None
        self.note_engine(info)
        self._up.set()

    def went_down(self, reason: str) -> None:
        if self.is_up:
            self._up.clear()
            self.down_since = self.failed_at = time.monotonic()
            self.num_failures += 1
        self.reason = reason

    def note_loss(self, prompt: Prompt, alone: bool, error: Unavailable) -> None:
        """Note that a prompt was sent and got no answer; the next engine to answer explains why."""
        prompt.num_unexplained += 1
        self._losses.append(_Loss(prompt, alone, error.broken))

    def explain_losses(self, ended: Callable[[_Loss], bool]) -> None:
        """Count the unexplained losses as those of an engine that has ended, or as interruptions."""
        losses, self._losses = self._losses, []
        for loss in losses:
            loss.prompt.num_unexplained -= 1
            if ended(loss):
                loss.prompt.num_ended += 1
                loss.prompt.num_ended_alone += loss.alone
            else:
                loss.prompt.num_interrupted += 1

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
