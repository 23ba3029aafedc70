"""Generating answers with vLLM, on any number of servers."""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice

import numpy as np

from data.capture.dispatch import PATIENCE_SECONDS, Dispatcher, Prompt
from data.capture.vllm.client import ExpectedTarget, VllmClient, check_target
from data.capture.vllm.server_info import ServerInfo
from data.generation.answers import Answers, Asked
from data.sampling import Sampling
from eagle31.errors import UserError

_RENDERING_SECONDS = 0.05  # at a time, so that an answer does not wait long for its next prompt


class VllmGenerator:
    """An `AnswerGenerator` that sends prompts to vLLM; each has its own seed and depends on no other.

    Prompts that are lost with a server are sent again; finished answers are kept.

    Args:
        clients: owned by this object, which closes them.
        patience_seconds: how long all servers may be unavailable at the same time.
    """

    engine = "vllm"

    def __init__(
        self,
        clients: Sequence[VllmClient],
        expected: ExpectedTarget,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._clients = clients
        self._expected = expected
        self._patience_seconds = patience_seconds
        self._loop = asyncio.new_event_loop()  # the clients outlive a call

    def converse(
        self,
        asked: Iterator[Asked],
        sampling: Sampling,
        answered: Callable[[Answers], list[Asked]],
        refused: Callable[[int, str], None],
    ) -> None:
        """See `AnswerGenerator.converse`.

        Raises:
            UserError: a server runs another target, or none was available for too long.
        """
        task = self._loop.create_task(self._converse(asked, sampling, answered, refused))
        try:
            self._loop.run_until_complete(task)
        finally:
            task.cancel()  # after an interrupt, the task must not restart an engine that `close` stops

    def close(self) -> None:
        """Close the clients."""
        for client in self._clients:
            self._loop.run_until_complete(client.close())
        self._loop.close()

    async def _converse(
        self,
        asked: Iterator[Asked],
        sampling: Sampling,
        answered: Callable[[Answers], list[Asked]],
        refused: Callable[[int, str], None],
    ) -> None:
        finished: list[tuple[int, list[int]]] = []
        refusals: list[tuple[int, str]] = []
        news = asyncio.Event()
        # As many wait as are under way, so that a server never does.
        most = 2 * sum(client.concurrency for client in self._clients)
        num_asked, longest = 0, sampling.max_new_tokens

        def check(client: VllmClient, info: ServerInfo) -> None:
            check_target(client, info, self._expected, longest)
            check_unchanged(client, info, samples=sampling.temperature > 0)

        def answer(prompt: Prompt, ids: list[int]) -> None:
            finished.append((prompt.index, ids))
            news.set()

        def refuse(prompt: Prompt, reason: str) -> None:
            refusals.append((prompt.index, reason))
            news.set()

        def advance(
            answers: Answers, unanswered: list[tuple[int, str]], room: int
        ) -> tuple[list[Asked], bool]:
            """Return the prompts that follow, and whether more could at once."""
            following = answered(answers) if answers else []
            for index, reason in unanswered:
                refused(index, reason)
            until = time.monotonic() + _RENDERING_SECONDS
            for one in islice(asked, room):
                following.append(one)
                if time.monotonic() > until:
                    return following, True
            return following, False

        dispatcher = Dispatcher(
            self._clients,
            check=check,
            answered=answer,
            refused=refuse,
            patience_seconds=self._patience_seconds,
        )
        running: asyncio.Task[None] | None = None
        with ThreadPoolExecutor(1) as renderer:  # templates take milliseconds, in which servers would wait
            try:
                while True:
                    news.clear()
                    answers, unanswered = finished.copy(), refusals.copy()
                    finished.clear()
                    refusals.clear()
                    num_asked -= len(answers) + len(unanswered)
                    room = max(most - num_asked, 0)
                    rendering = self._loop.run_in_executor(renderer, advance, answers, unanswered, room)
                    prompts, has_more = await rendering
                    num_asked += len(prompts)
                    if not num_asked:
                        return
                    longest = max([longest, *(len(one.prompt) + sampling.max_new_tokens for one in prompts)])
                    for one in prompts:
                        # A conversation that continues keeps its place: those that were begun end before
                        # others begin.
                        seeded = replace(sampling, seed=_seed(sampling.seed, *one.seed))
                        dispatcher.add(Prompt(one.index, secrets.token_hex(8), list(one.prompt), seeded))
                    running = running or asyncio.create_task(dispatcher.run())
                    if not has_more:
                        waiting = asyncio.create_task(news.wait())
                        await asyncio.wait([waiting, running], return_when=asyncio.FIRST_COMPLETED)
                        waiting.cancel()
                    if running.done():
                        running.result()
            finally:
                if running is not None:
                    running.cancel()
                    await asyncio.wait([running])


def check_unchanged(client: VllmClient, info: ServerInfo, *, samples: bool) -> None:
    """Raise UserError for a server that captures, where that can change its completions.

    Capture is a kind of speculative decoding to vLLM. With asynchronous scheduling, vLLM continues a
    completion from the wrong one of two tokens (vllm#56417). On the CPU, vLLM 0.32 ignores temperatures then.
    """
    if not info.aux_layer_ids:
        return
    if info.async_scheduling:
        remedy = (
            "It captures hidden states with asynchronous scheduling, where vLLM may repeat tokens of a "
            "completion (vllm#56417); start it with scripts/serve_target, or with --no-async-scheduling."
        )
        raise UserError("vllm.servers", client.name, remedy)
    if info.device == "cpu" and samples:
        remedy = (
            "It captures hidden states on a CPU, where vLLM then ignores the temperature; set "
            "data.regenerate.temperature=0, or name no servers."
        )
        raise UserError("vllm.servers", client.name, remedy)


def _seed(seed: int, *index: int) -> int:
    """Return the seed of one answer."""
    return int(np.random.SeedSequence((seed, *index)).generate_state(1)[0])
