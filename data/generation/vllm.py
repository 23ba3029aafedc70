"""Generating answers with vLLM, on any number of servers."""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from data.capture.dispatch import PATIENCE_SECONDS, Dispatcher, Prompt
from data.capture.vllm.client import ExpectedTarget, VllmClient, check_target
from data.capture.vllm.server_info import ServerInfo
from data.generation.answers import Answers
from data.sampling import Sampling
from eagle31.errors import UserError

_HAND_OVER_SECONDS = 0.5  # a killed run loses the answers of at most this time


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
        first: Mapping[int, Sequence[int]],
        sampling: Sampling,
        on_answers: Callable[[Answers], None],
        next_prompt: Callable[[int, list[int]], Sequence[int] | None],
        seed: Callable[[int], tuple[int, ...]],
    ) -> dict[int, str]:
        """See `AnswerGenerator.converse`.

        Raises:
            UserError: a server runs another target, or none was available for too long.
        """
        task = self._loop.create_task(self._converse(first, sampling, on_answers, next_prompt, seed))
        try:
            return self._loop.run_until_complete(task)
        finally:
            task.cancel()  # after an interrupt, the task must not restart an engine that `close` stops

    def close(self) -> None:
        """Close the clients."""
        for client in self._clients:
            self._loop.run_until_complete(client.close())
        self._loop.close()

    async def _converse(
        self,
        first: Mapping[int, Sequence[int]],
        sampling: Sampling,
        on_answers: Callable[[Answers], None],
        next_prompt: Callable[[int, list[int]], Sequence[int] | None],
        seed: Callable[[int], tuple[int, ...]],
    ) -> dict[int, str]:
        longest = max(map(len, first.values())) + sampling.max_new_tokens
        finished: list[tuple[int, list[int]]] = []
        refused: dict[int, str] = {}
        unfinished = set(first)
        failures: list[BaseException] = []

        def check(client: VllmClient, info: ServerInfo) -> None:
            check_target(client, info, self._expected, longest)
            check_unchanged(client, info, samples=sampling.temperature > 0)

        def send(index: int, prompt: Sequence[int]) -> None:
            # A conversation that continues keeps its place: those that were begun end before others begin.
            seeded = replace(sampling, seed=_seed(sampling.seed, *seed(index)))
            dispatcher.add(Prompt(index, secrets.token_hex(8), list(prompt), seeded))

        def answered(prompt: Prompt, ids: list[int]) -> None:
            finished.append((prompt.index, ids))
            try:
                following = next_prompt(prompt.index, ids)
            except BaseException as error:
                failures.append(error)
                return
            if following is None:
                unfinished.discard(prompt.index)
            else:
                send(prompt.index, following)

        def refuse(prompt: Prompt, reason: str) -> None:
            refused[prompt.index] = reason
            unfinished.discard(prompt.index)

        def hand_over() -> None:
            if finished:
                answers = list(finished)
                finished.clear()
                on_answers(answers)

        dispatcher = Dispatcher(
            self._clients,
            check=check,
            answered=answered,
            refused=refuse,
            patience_seconds=self._patience_seconds,
        )
        for index, prompt in first.items():
            send(index, prompt)
        running = asyncio.create_task(dispatcher.run())
        try:
            while unfinished and not failures and not running.done():
                await asyncio.wait([running], timeout=_HAND_OVER_SECONDS)
                hand_over()
        finally:
            hand_over()
            running.cancel()
            await asyncio.wait([running])
        if failures:
            raise failures[0]
        if not running.cancelled():
            running.result()
        return refused


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
