"""What prompts are sent to: a vLLM server, or an engine of the run's own."""

from typing import Any, Protocol

from data.vllm.facts import ServerFacts
from data.vllm.order import DESCRIBE, PARAMS
from eagle31.errors import UserError


class Unavailable(Exception):
    """Nobody answers there now; `lost` where the prompt had been sent, and may be what ended the server."""

    def __init__(self, reason: str, lost: bool = False) -> None:
        super().__init__(reason)
        self.lost = lost


class Refused(Exception):
    """This prompt will never be answered."""


class Endpoint(Protocol):
    name: str
    concurrency: int  # prompts under way

    async def send(self, input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        """Computes a prompt; returns what the connector answers.

        Raises:
            Unavailable, Refused: see there.
            UserError: it is set up in another way than is needed, or for good gone.
        """
        ...

    async def close(self) -> None: ...


async def describe(endpoint: Endpoint) -> ServerFacts:
    """Raises what `send` does, and UserError for a server without the connector."""
    answer = await endpoint.send([0], DESCRIBE)
    if "id" not in answer:
        remedy = "Runs without eagle31's connector; start it with scripts/serve_target."
        raise UserError("vllm.servers", endpoint.name, remedy)
    return ServerFacts.from_json(answer)


def connector_answer(params: dict[str, Any] | None) -> dict[str, Any]:
    """Out of the answer's `kv_transfer_params`; raises Refused."""
    answer = (params or {}).get(PARAMS) or {}
    if "error" in answer:
        raise Refused(answer["error"])
    return answer
