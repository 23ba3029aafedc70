"""Generating answers with vLLM, on any number of servers."""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue

import numpy as np

from data.capture.dispatch import PATIENCE_SECONDS, Dispatcher, EngineThread, Prompt
from data.capture.vllm.client import ExpectedTarget, VllmClient, check_target
from data.capture.vllm.server_info import ServerInfo
from data.generation.answers import Answers, Asked
from data.sampling import Sampling
from eagle31.errors import UserError

_RENDERING_SECONDS = 0.05


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
        self._thread = EngineThread(clients)

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
        # An answer, the reason of a refusal, or None once no prompt will be sent any more.
        finished: SimpleQueue[tuple[int, list[int] | str] | None] = SimpleQueue()
        # As many wait as are under way, so that a server never does.
        most = 2 * sum(client.concurrency for client in self._clients)
        longest = sampling.max_new_tokens

        def check(client: VllmClient, info: ServerInfo) -> None:
            check_target(client, info, self._expected, longest)
            check_unchanged(client, info, samples=sampling.temperature > 0)

        dispatcher = Dispatcher(
            self._clients,
            check=check,
            answered=lambda prompt, ids: finished.put((prompt.index, ids)),
            refused=lambda prompt, reason: finished.put((prompt.index, reason)),
            patience_seconds=self._patience_seconds,
        )
        running: Future[None] | None = None
        num_asked = 0

        def send(one: Asked) -> None:
            nonlocal running, num_asked, longest
            num_asked += 1
            longest = max(longest, len(one.prompt) + sampling.max_new_tokens)
            seeded = replace(sampling, seed=_seed(sampling.seed, *one.seed))
            # A conversation that continues keeps its place: those that were begun end before others begin.
            prompt = Prompt(one.index, secrets.token_hex(8), list(one.prompt), seeded)
            self._thread.call(dispatcher.add, prompt)
            if running is None:
                running = self._thread.start(dispatcher.run())
                running.add_done_callback(lambda _: finished.put(None))

        try:
            while True:
                # Templates take milliseconds, and an answer does not wait long for its next prompt.
                until = time.monotonic() + _RENDERING_SECONDS
                while num_asked < most and (finished.empty() or time.monotonic() < until):
                    if (one := next(asked, None)) is None:
                        break
                    send(one)
                if running is None or not num_asked:
                    return
                news = [finished.get()]
                while not finished.empty():
                    news.append(finished.get())
                if None in news:
                    running.result()
                found = [one for one in news if one is not None]
                num_asked -= len(found)
                for index, reason in found:
                    if isinstance(reason, str):
                        refused(index, reason)
                answers = [(index, ids) for index, ids in found if not isinstance(ids, str)]
                for following in answered(answers) if answers else []:
                    send(following)
        finally:
            self._thread.cancel_all()

    def close(self) -> None:
        """Close the clients."""
        self._thread.close()


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
