"""Generating answers with vLLM, on any number of servers."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from data.sampling import Prompts, Sampling
from data.vllm.dispatch import PATIENCE_SECONDS, Dispatcher, Prompt
from data.vllm.endpoint import Endpoint, ExpectedTarget, check_target
from data.vllm.server_info import ServerInfo
from eagle31.errors import UserError

_HAND_OVER_SECONDS = 0.5  # a killed run loses the answers of at most this time


class VllmGenerator:
    """An `AnswerGenerator` that sends prompts to vLLM; each has its own seed and depends on no other.

    Prompts that are lost with an endpoint are sent again; finished answers are kept.

    Args:
        endpoints: owned by this object, which closes them.
        patience_seconds: how long all endpoints may be unavailable at the same time.
    """

    engine = "vllm"

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        expected: ExpectedTarget,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._endpoints = endpoints
        self._expected = expected
        self._patience_seconds = patience_seconds
        self._loop = asyncio.new_event_loop()  # the endpoints outlive a call

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
        task = self._loop.create_task(self._generate(prompts, indices, sampling, on_answers))
        try:
            return self._loop.run_until_complete(task)
        finally:
            task.cancel()  # after an interrupt, the task must not restart an engine that `close` stops

    def close(self) -> None:
        """Close the endpoints."""
        for endpoint in self._endpoints:
            self._loop.run_until_complete(endpoint.close())
        self._loop.close()

    async def _generate(
        self,
        prompts: Prompts,
        indices: Sequence[int],
        sampling: Sampling,
        on_answers: Callable[[Mapping[int, list[int]]], None],
    ) -> dict[int, str]:
        # The longest prompts first: one that does not fit is refused early.
        by_length = sorted(indices, key=lambda i: -len(prompts[i]))
        longest = len(prompts[by_length[0]]) + sampling.max_new_tokens
        finished: dict[int, list[int]] = {}
        refused: dict[int, str] = {}

        def check(endpoint: Endpoint, info: ServerInfo) -> None:
            check_target(endpoint, info, self._expected, longest)
            check_unchanged(endpoint, info, sampling.temperature)

        dispatcher = Dispatcher(
            self._endpoints,
            check=check,
            answered=lambda prompt, _, ids: finished.update({by_length[prompt.index]: ids}),
            refused=lambda prompt, reason: refused.update({by_length[prompt.index]: reason}),
            patience_seconds=self._patience_seconds,
        )
        for priority, index in enumerate(by_length):
            seeded = replace(sampling, seed=_seed(sampling.seed, index))
            dispatcher.add(Prompt(priority, str(index), list(prompts[index]), seeded))
        running = asyncio.create_task(dispatcher.run())
        num_finished = 0
        try:
            while num_finished + len(refused) < len(by_length) and not running.done():
                await asyncio.wait([running], timeout=_HAND_OVER_SECONDS)
                num_finished += _hand_over(finished, on_answers)
        finally:
            _hand_over(finished, on_answers)
            running.cancel()
            await asyncio.wait([running])
        if not running.cancelled():
            running.result()
        return refused


def _hand_over(finished: dict[int, list[int]], on_answers: Callable[[Mapping[int, list[int]]], None]) -> int:
    """Pass the finished answers on, and return how many there were."""
    answers = dict(finished)
    finished.clear()
    if answers:
        on_answers(answers)
    return len(answers)


def check_unchanged(endpoint: Endpoint, info: ServerInfo, temperature: float) -> None:
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
        raise UserError("vllm.servers", endpoint.name, remedy)
    if info.device == "cpu" and temperature:
        remedy = (
            "It captures hidden states on a CPU, where vLLM then ignores the temperature; set "
            "data.regenerate.temperature=0, or name no servers."
        )
        raise UserError("vllm.servers", endpoint.name, remedy)


def _seed(seed: int, index: int) -> int:
    """Return the seed of one answer."""
    return int(np.random.SeedSequence((seed, index)).generate_state(1)[0])
