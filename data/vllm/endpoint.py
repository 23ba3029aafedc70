"""The interface of what prompts are sent to: a vLLM server."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from data.sampling import Sampling
from data.vllm.capture_request import PARAMS, describe_params
from data.vllm.server_info import ServerInfo
from eagle31.errors import UserError


class Unavailable(Exception):
    """The endpoint does not answer now.

    Attributes:
        lost: the prompt had been sent, and may have ended the engine.
        broken: the server itself broke off, rather than a proxy or a time limit.
    """

    def __init__(self, reason: str, lost: bool = False, broken: bool = False) -> None:
        super().__init__(reason)
        self.lost, self.broken = lost, broken


class Refused(Exception):
    """The endpoint will never answer this prompt."""


class DestinationFailed(Refused):
    """The endpoint cannot write to the destination of the prompt, or of one that this client sent before."""


class Endpoint(Protocol):
    name: str
    concurrency: int  # prompts under way

    async def send(self, input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        """Compute a prompt and return the connector's answer.

        Raises:
            Unavailable, Refused, DestinationFailed: see these classes.
            UserError: the endpoint is not set up as required, or has ended for good.
        """
        ...

    async def generate(self, input_ids: list[int], sampling: Sampling) -> list[int]:
        """Return a prompt's completion, which includes the first stop token; raise what `send` does."""
        ...

    async def close(self) -> None: ...


async def describe(endpoint: Endpoint, client: str = "", flush: bool = False) -> ServerInfo:
    """Return the server info.

    Args:
        client: the name under which this process has sent capture requests.
        flush: have the server close its open shards for this client.

    Raises:
        Unavailable, Refused: as with `Endpoint.send`.
        DestinationFailed: the server could not write what this client had sent before.
        UserError: the server has no connector.
    """
    answer = await endpoint.send([0], describe_params(client, flush))
    if "id" not in answer:
        remedy = "It runs without eagle31's connector; start it with scripts/serve_target."
        raise UserError("vllm.servers", endpoint.name, remedy)
    failures = answer.pop("failures", [])
    if failures:
        raise DestinationFailed(failures[0])
    return ServerInfo.from_json(answer)


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Return fields of a completion request and of SamplingParams; none is left to the model's settings."""
    drawn: dict[str, Any] = {}
    if sampling.temperature:
        drawn = {"temperature": sampling.temperature, "seed": sampling.seed}
        drawn |= {"top_p": sampling.top_p, "top_k": sampling.top_k}
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
    """Raise Refused for a completion that vLLM did not finish."""
    if reason not in ("stop", "length"):
        raise Refused(f"vLLM did not finish it: {reason}")


@dataclass(frozen=True)
class ExpectedTarget:
    """The target that every server must run."""

    target: str  # the `model` argument of vLLM
    target_fingerprint: str
    dtype: torch.dtype


def check_target(endpoint: Endpoint, info: ServerInfo, expected: ExpectedTarget, longest: int) -> None:
    """Raise UserError for a server of another target, or one that was started for shorter samples.

    Args:
        longest: the number of tokens of the longest sample, or of prompt and completion together.
    """
    same_target = info.target_fingerprint in (expected.target_fingerprint, None)
    if not same_target or (info.target_fingerprint is None and info.model != expected.target):
        found = f"{info.model}, not {expected.target}, or it has other weights"
        raise other_server(endpoint, "target is", found)
    dtype = str(expected.dtype).removeprefix("torch.")
    if info.dtype != dtype:
        raise other_server(endpoint, "dtype is", f"{info.dtype}, not {dtype}")
    if info.max_tokens < longest:
        found = f"{info.max_tokens} tokens where a sample has {longest}"
        raise other_server(endpoint, "longest prompt has", found)


def other_server(endpoint: Endpoint, what: str, found: str) -> UserError:
    remedy = f"Its {what} {found}; start it with scripts/serve_target and the recipe of this run."
    return UserError("vllm.servers", endpoint.name, remedy)


def connector_answer(params: dict[str, Any] | None) -> dict[str, Any]:
    """Return the connector's answer in `kv_transfer_params`.

    Raises:
        Refused, DestinationFailed: it is an error, or no answer of a connector.
    """
    answer = (params.get(PARAMS) or {}) if isinstance(params, dict) else (params or {})
    if not isinstance(answer, dict):
        raise Refused(f"The server's answer is no object: {str(answer)[:100]}")
    if "error" in answer:
        raise (DestinationFailed if answer.get("destination") else Refused)(answer["error"])
    return answer
