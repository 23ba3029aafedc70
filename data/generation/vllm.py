"""Generating answers with vLLM, on any number of servers."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from data.capture.dispatch import PATIENCE_SECONDS, Completions, Dispatcher, Prompt
from data.capture.vllm.client import VllmClient
from data.capture.vllm.server_info import ServerInfo
from data.generation.answers import Turn
from data.sampling import Sampling, mixed_seed
from eagle31.errors import UserError


class VllmGenerator:
    """An `AnswerGenerator` that sends prompts to vLLM; each has its own seed and depends on no other.

    Prompts that are lost with a server are sent again; finished answers are kept.

    Args:
        clients: owned by this object, which closes them.
        check: raises UserError for a server that is not set up as required.
        patience_seconds: how long all servers may be unavailable at the same time.
    """

    engine, group_size = "vllm", 1

    def __init__(
        self,
        clients: Sequence[VllmClient],
        check: Callable[[Any, Any], None],
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        # As many wait as are under way, so that a server never does.
        self.num_groups = 2 * sum(client.concurrency for client in clients)
        self._dispatcher = Dispatcher(clients, check, patience_seconds)

    def submit(self, group: Sequence[Turn], sampling: Sampling) -> Future[Completions]:
        """See `AnswerGenerator.submit`; UserError where a server is another one, or none was available."""
        [turn] = group
        seeded = replace(sampling, seed=mixed_seed(sampling.seed, *turn.seed))
        # A conversation that continues keeps its place: those that were begun end before others begin.
        order = turn.block.number, turn.index
        return self._dispatcher.submit(Prompt(order, str(order), list(turn.prompt), seeded))

    def close(self) -> None:
        """Close the clients."""
        self._dispatcher.close()


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
