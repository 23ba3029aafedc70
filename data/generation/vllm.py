"""The target's answers by vLLM: any number of servers, or an engine of the run's own."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from data.sampling import Prompts, Sampling
from data.vllm.dispatch import PATIENCE_SECONDS, Dispatcher, Prompt
from data.vllm.endpoint import Endpoint, ExpectedTarget, check_target
from data.vllm.server_info import ServerInfo
from eagle31.errors import UserError

_WRITE_SECONDS = 0.5  # between two appends: what a kill can cost


class VllmGenerator:
    """An `AnswerGenerator`; every answer has a seed of its own, so that it depends on no other.

    What is under way when an endpoint goes away is sent again, what was answered is kept.

    Args:
        endpoints: used by this object alone, which closes them.
        patience_seconds: how long all endpoints may be away at once.
    """

    engine = "vllm"

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        wanted: ExpectedTarget,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._endpoints = endpoints
        self._wanted = wanted
        self._patience_seconds = patience_seconds
        self._loop = asyncio.new_event_loop()  # endpoints live on from one call to the next

    def write(
        self,
        prompts: Prompts,
        missing: Sequence[int],
        sampling: Sampling,
        done: Callable[[Mapping[int, list[int]]], None],
    ) -> dict[int, str]:
        """Raises UserError for a server of another target, or when none has been there for too long."""
        writing = self._loop.create_task(self._write(prompts, missing, sampling, done))
        try:
            return self._loop.run_until_complete(writing)
        finally:
            writing.cancel()  # after an interrupt: it must not start an engine again while `close` ends it

    def close(self) -> None:
        """Ends an engine of the run's own."""
        for endpoint in self._endpoints:
            self._loop.run_until_complete(endpoint.close())
        self._loop.close()

    async def _write(
        self,
        prompts: Prompts,
        missing: Sequence[int],
        sampling: Sampling,
        done: Callable[[Mapping[int, list[int]]], None],
    ) -> dict[int, str]:
        # Longest first: what does not fit fails at once.
        order = sorted(missing, key=lambda i: -len(prompts[i]))
        longest = len(prompts[order[0]]) + sampling.max_new_tokens
        finished: dict[int, list[int]] = {}
        refused: dict[int, str] = {}

        def check(endpoint: Endpoint, facts: ServerInfo) -> None:
            check_target(endpoint, facts, self._wanted, longest)
            if sampling.temperature:
                _check_sampling(endpoint, facts)

        dispatcher = Dispatcher(
            self._endpoints,
            check=check,
            answered=lambda prompt, _, ids: finished.update({order[prompt.place]: ids}),
            refused=lambda prompt, reason: refused.update({order[prompt.place]: reason}),
            patience_seconds=self._patience_seconds,
        )
        for place, index in enumerate(order):
            own = replace(sampling, seed=_seed(sampling.seed, index))
            dispatcher.add(Prompt(place, str(index), list(prompts[index]), own))
        running = asyncio.create_task(dispatcher.run())
        num_written = 0
        try:
            while num_written + len(refused) < len(order) and not running.done():
                await asyncio.wait([running], timeout=_WRITE_SECONDS)
                num_written += _hand_over(finished, done)
        finally:
            _hand_over(finished, done)
            running.cancel()
            await asyncio.wait([running])
        if not running.cancelled():
            running.result()
        return refused


def _hand_over(finished: dict[int, list[int]], done: Callable[[Mapping[int, list[int]]], None]) -> int:
    """How many there were."""
    written = dict(finished)
    finished.clear()
    if written:
        done(written)
    return len(written)


def _check_sampling(endpoint: Endpoint, facts: ServerInfo) -> None:
    """Capture is a kind of speculative decoding, whose temperatures vLLM 0.32 does not read on the CPU."""
    if facts.device == "cpu" and facts.aux_layer_ids:
        remedy = (
            "Captures on a CPU, where vLLM samples wrongly beside that; set data.regenerate.temperature=0, "
            "or name no servers."
        )
        raise UserError("vllm.servers", endpoint.name, remedy)


def _seed(seed: int, index: int) -> int:
    """Of one answer."""
    return int(np.random.SeedSequence((seed, index)).generate_state(1)[0])
