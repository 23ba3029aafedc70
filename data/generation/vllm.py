"""Generating answers with vLLM, on any number of servers."""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from data.capture.vllm.client import ExpectedTarget, VllmClient, check_target
from data.capture.vllm.dispatch import PATIENCE_SECONDS, Dispatcher, Prompt
from data.capture.vllm.server_info import ServerInfo
from data.sampling import Prompts, Sampling
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

    def generate(
        self,
        prompts: Prompts,
        indices: Sequence[int],
        sampling: Sampling,
        on_answers: Callable[[Mapping[int, list[int]]], None],
    ) -> dict[int, str]:
        """Answer the prompts with the given indices; see `AnswerGenerator.generate`.

        Raises:
            UserError: a server runs another target, or none was available for too long.
        """
        first = {index: prompts[index] for index in indices}
        return self.converse(
            first,
            sampling,
            lambda answers: on_answers(dict(answers)),
            next_prompt=lambda index, ids: None,
            seed=lambda index: (index,),
        )

    def converse(
        self,
        first: Mapping[int, Sequence[int]],
        sampling: Sampling,
        on_answers: Callable[[Sequence[tuple[int, list[int]]]], None],
        next_prompt: Callable[[int, list[int]], Sequence[int] | None],
        seed: Callable[[int], tuple[int, ...]],
    ) -> dict[int, str]:
        """Answer conversations, each of which continues as soon as its last prompt is answered.

        Args:
            first: each conversation's first prompt, by index.
            on_answers: called with (index, token ids) of finished answers, in their order, about every half
                second.
            next_prompt: returns the prompt of a conversation after an answer, or None at its end. An error
                that it raises ends the generation.
            seed: returns what the seed of a conversation's next answer is made of.

        Returns:
            The reasons why a conversation's prompt was refused, by index.

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
        on_answers: Callable[[Sequence[tuple[int, list[int]]]], None],
        next_prompt: Callable[[int, list[int]], Sequence[int] | None],
        seed: Callable[[int], tuple[int, ...]],
    ) -> dict[int, str]:
        # The longest prompts first: one that does not fit is refused early. A conversation that continues
        # keeps its place, so that those that were begun end before others begin.
        by_length = sorted(first, key=lambda index: -len(first[index]))
        longest = len(first[by_length[0]]) + sampling.max_new_tokens
        finished: list[tuple[int, list[int]]] = []
        refused: dict[int, str] = {}
        unfinished = set(first)
        failures: list[BaseException] = []

        def check(client: VllmClient, info: ServerInfo) -> None:
            check_target(client, info, self._expected, longest)
            check_unchanged(client, info, sampling.temperature)

        def send(priority: int, prompt: Sequence[int]) -> None:
            index = by_length[priority]
            seeded = replace(sampling, seed=_seed(sampling.seed, *seed(index)))
            dispatcher.add(Prompt(priority, secrets.token_hex(8), list(prompt), seeded))

        def answered(prompt: Prompt, ids: list[int]) -> None:
            index = by_length[prompt.index]
            finished.append((index, ids))
            try:
                following = next_prompt(index, ids)
            except BaseException as error:
                failures.append(error)
                return
            if following is None:
                unfinished.discard(index)
            else:
                send(prompt.index, following)

        def refuse(prompt: Prompt, reason: str) -> None:
            refused[by_length[prompt.index]] = reason
            unfinished.discard(by_length[prompt.index])

        dispatcher = Dispatcher(
            self._clients,
            check=check,
            answered=answered,
            refused=refuse,
            patience_seconds=self._patience_seconds,
        )
        for priority, index in enumerate(by_length):
            send(priority, first[index])
        running = asyncio.create_task(dispatcher.run())
        try:
            while unfinished and not failures and not running.done():
                await asyncio.wait([running], timeout=_HAND_OVER_SECONDS)
                _hand_over(finished, on_answers)
        finally:
            _hand_over(finished, on_answers)
            running.cancel()
            await asyncio.wait([running])
        if failures:
            raise failures[0]
        if not running.cancelled():
            running.result()
        return refused


def _hand_over(
    finished: list[tuple[int, list[int]]], on_answers: Callable[[Sequence[tuple[int, list[int]]]], None]
) -> None:
    """Pass the finished answers on."""
    answers = list(finished)
    finished.clear()
    if answers:
        on_answers(answers)


def check_unchanged(client: VllmClient, info: ServerInfo, temperature: float) -> None:
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
    if info.device == "cpu" and temperature:
        remedy = (
            "It captures hidden states on a CPU, where vLLM then ignores the temperature; set "
            "data.regenerate.temperature=0, or name no servers."
        )
        raise UserError("vllm.servers", client.name, remedy)


def _seed(seed: int, *index: int) -> int:
    """Return the seed of one answer."""
    return int(np.random.SeedSequence((seed, *index)).generate_state(1)[0])
