"""What prompts are sent to: a vLLM server, or an engine of the run's own."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from data.sampling import Sampling
from data.vllm.capture_request import DESCRIBE, PARAMS
from data.vllm.server_info import ServerInfo
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

    async def generate(self, input_ids: list[int], sampling: Sampling) -> list[int]:
        """The ids that answer a prompt, up to and with the first stop token; raises what `send` does."""
        ...

    async def close(self) -> None: ...


async def describe(endpoint: Endpoint) -> ServerInfo:
    """Raises what `send` does, and UserError for a server without the connector."""
    answer = await endpoint.send([0], DESCRIBE)
    if "id" not in answer:
        remedy = "Runs without eagle31's connector; start it with scripts/serve_target."
        raise UserError("vllm.servers", endpoint.name, remedy)
    return ServerInfo.from_json(answer)


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Of a completion request, and of vLLM's SamplingParams: all that a model's own settings could change."""
    drawn = {"temperature": sampling.temperature, "seed": sampling.seed} if sampling.temperature else {}
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "ignore_eos": True,  # the stop tokens are given
        "stop_token_ids": list(sampling.stop_token_ids),
    } | drawn


def check_finished(reason: str | None) -> None:
    """Raises Refused for an answer that is none."""
    if reason not in ("stop", "length"):
        raise Refused(f"vLLM gave it up: {reason}")


@dataclass(frozen=True)
class ExpectedTarget:
    """What every server has to run."""

    target: str  # as vLLM is told
    target_fingerprint: str
    dtype: torch.dtype


def check_target(endpoint: Endpoint, facts: ServerInfo, wanted: ExpectedTarget, longest: int) -> None:
    """Raises UserError for a server of another target, or one that was started for less.

    Args:
        longest: tokens of the longest sample, or of prompt and answer together.
    """
    same_target = facts.target_fingerprint in (wanted.target_fingerprint, None)
    if not same_target or (facts.target_fingerprint is None and facts.model != wanted.target):
        found = f"{facts.model}, not {wanted.target}, or other weights"
        raise other_server(endpoint, "target is", found)
    dtype = str(wanted.dtype).removeprefix("torch.")
    if facts.dtype != dtype:
        raise other_server(endpoint, "dtype is", f"{facts.dtype}, not {dtype}")
    if facts.max_tokens < longest:
        found = f"{facts.max_tokens} tokens where a sample has {longest}"
        raise other_server(endpoint, "longest prompt has", found)


def other_server(endpoint: Endpoint, what: str, found: str) -> UserError:
    remedy = f"Its {what} {found}; start it with scripts/serve_target and the recipe of this run."
    return UserError("vllm.servers", endpoint.name, remedy)


def connector_answer(params: dict[str, Any] | None) -> dict[str, Any]:
    """Out of the answer's `kv_transfer_params`; raises Refused."""
    answer = (params or {}).get(PARAMS) or {}
    if "error" in answer:
        raise Refused(answer["error"])
    return answer
