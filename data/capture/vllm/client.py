"""The client of a vLLM server, and what a run demands of the server."""

import asyncio
import json
import math
import os
from collections.abc import Callable
from typing import Any

import httpx

from data.capture.dispatch import Completions, Prompt, Refused, Unavailable
from data.capture.vllm.capture_request import PARAMS
from data.capture.vllm.environment import KEY_VARIABLE
from data.capture.vllm.server_info import INFO_PATH, ServerInfo
from data.progress import STALL_SECONDS
from data.sampling import Sampling
from data.target.parts import CapturedTarget
from eagle31.errors import UserError

_CONNECT_SECONDS = 10.0
_INFO_SECONDS = 20.0  # for what waits for no prompt
_CACHES = 2  # what is computed, and what waits for it
_TOKEN_SECONDS = 0.5  # per token of a completion, at most, by a loaded server
_NO_ENTRY = (401, 403)
_LATER = (408, 425, 429)
_REFUSALS = (400, 413, 422)  # refuse a prompt; the other 4xx mean that our request is wrong
_OTHER = "Give the address of a server that scripts/serve_target has started."


class VllmClient:
    """A client of a vLLM server that scripts/serve_target or this run starts.

    Args:
        concurrency: the most prompts under way.
        key: the server's key, sent as a bearer token; None takes it from VLLM_API_KEY, if that is set.
        check: called when the server does not answer; raises UserError where it never will.
        answer_seconds: the longest time until the answer to a prompt, besides the time for its completion.
        num_sharing: the number of processes that send to the server at a time. Their prompts and completions
            under way have at most twice the tokens of its cache: one that waits there too long is lost.
    """

    field = "vllm.servers"
    remedy = "start them with scripts/serve_target"

    def __init__(
        self,
        url: str,
        concurrency: int,
        key: str | None = None,
        check: Callable[[], None] = lambda: None,
        answer_seconds: float = STALL_SECONDS,
        num_sharing: int = 1,
    ) -> None:
        self.name = url.rstrip("/").removesuffix("/v1")
        self.concurrency = concurrency
        self._num_sharing = num_sharing
        self._most_tokens, self._num_tokens = math.inf, 0  # under way
        self._turn, self._answered = asyncio.Lock(), asyncio.Event()
        self._check, self._answer_seconds = check, answer_seconds
        key = key or os.environ.get(KEY_VARIABLE)
        self._client = httpx.AsyncClient(
            base_url=self.name,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            trust_env=False,
        )

    async def info(self) -> ServerInfo:
        """Return what the server runs.

        Raises:
            Unavailable: it does not answer.
            UserError: it is no server of this version of eagle31, or demands another key.
        """
        info = ServerInfo.from_json(await self._request("GET", INFO_PATH, seconds=_INFO_SECONDS))
        if info.cache_tokens is not None:
            self._most_tokens = _CACHES * info.cache_tokens / self._num_sharing
        return info

    async def compute(self, prompt: Prompt) -> Completions:
        """Return the completion, if one is requested; otherwise the task is the `kv_transfer_params`."""
        if isinstance(prompt.task, Sampling):
            return [await self.generate(prompt.input_ids, prompt.task)]
        await self.capture(prompt.input_ids, prompt.task)
        return []

    async def capture(self, input_ids: list[int], params: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """Have the server compute a prompt and deliver its states, which may arrive after the answer.

        Args:
            params: the `kv_transfer_params`; {} captures nothing.
            fields: further fields of the request.

        Returns:
            The answer.

        Raises:
            Unavailable, Refused: see these classes.
            UserError: the server is not set up as required, or has ended for good.
        """
        fields |= {"max_tokens": 1, "temperature": 0.0, "kv_transfer_params": params}
        answer = await self._complete(input_ids, fields, self._answer_seconds)
        own = (answer.get("kv_transfer_params") or {}).get(PARAMS)
        if params and not isinstance(own, dict):
            remedy = "It runs without eagle31's connector; start it with scripts/serve_target."
            raise UserError("vllm.servers", self.name, remedy)
        if own and "error" in own:
            raise Refused(str(own["error"]))
        return answer

    async def generate(self, input_ids: list[int], sampling: Sampling) -> list[int]:
        """Return a prompt's completion, which includes the first stop token; raise what `capture` does."""
        seconds = self._answer_seconds + _TOKEN_SECONDS * sampling.max_new_tokens
        fields = _sampling_fields(sampling) | {"return_token_ids": True}
        (choice,) = (await self._complete(input_ids, fields, seconds))["choices"]
        if choice["finish_reason"] not in ("stop", "length"):
            raise Refused(f"vLLM did not finish it: {choice['finish_reason']}")
        return choice["token_ids"]

    async def close(self) -> None:
        await self._client.aclose()

    async def _complete(self, input_ids: list[int], fields: dict[str, Any], seconds: float) -> dict[str, Any]:
        num_tokens = len(input_ids) + fields["max_tokens"]
        async with self._turn:
            while self._num_tokens and self._num_tokens + num_tokens > self._most_tokens:
                self._answered.clear()
                await self._answered.wait()
            self._num_tokens += num_tokens
        try:
            answer = await self._request("POST", "/v1/completions", {"prompt": input_ids, **fields}, seconds)
            if any(choice["finish_reason"] == "abort" for choice in answer["choices"]):
                raise Unavailable("The server ended while it computed the prompt.", lost=True)
            return answer
        finally:
            self._num_tokens -= num_tokens
            self._answered.set()

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None, seconds: float = _INFO_SECONDS
    ) -> dict[str, Any]:
        timeout = httpx.Timeout(seconds, connect=_CONNECT_SECONDS)
        try:
            response = await self._client.request(method, path, json=body, timeout=timeout)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            self._check()
            raise Unavailable(f"No server answers at this address ({error}).") from error
        except httpx.TransportError as error:
            self._check()
            raise Unavailable(f"The connection to the server broke ({error!r}).", lost=True) from error
        status = response.status_code
        if status in _REFUSALS:
            raise Refused(_reason(response))
        if status in _LATER or status >= 500:
            raise Unavailable(f"The server answered {status}: {_reason(response)}", lost=status >= 500)
        if status in _NO_ENTRY:
            remedy = f"It demands another key; set {KEY_VARIABLE} to the key that it was started with."
            raise UserError("vllm.servers", self.name, remedy)
        if status >= 400:
            remedy = f"It answered {status}: {_reason(response)} {_OTHER}"
            raise UserError("vllm.servers", self.name + path, remedy)
        try:
            return response.json()
        except json.JSONDecodeError as error:
            raise Unavailable(f"The answer is no JSON: {response.text[:200]}", lost=True) from error


def check_target(target: CapturedTarget, longest: int, client: VllmClient, info: ServerInfo) -> None:
    """Raise UserError for a server of another target, or one that was started for shorter samples.

    Args:
        longest: the number of tokens of the longest sample, or of prompt and completion together.
    """
    path = target.spec.checkpoint.path
    same_target = info.target_fingerprint in (target.parts.fingerprint, None)
    if not same_target or (info.target_fingerprint is None and info.model != path):
        raise _other_server(client, "target is", f"{info.model}, not {path}, or it has other weights")
    if info.dtype != target.parts.dtype_name:
        raise _other_server(client, "dtype is", f"{info.dtype}, not {target.parts.dtype_name}")
    if info.max_tokens < longest:
        found = f"{info.max_tokens} tokens where a sample has {longest}"
        raise _other_server(client, "longest prompt has", found)


def check_states(target: CapturedTarget, longest: int, client: VllmClient, info: ServerInfo) -> None:
    """Raise UserError for a server that would capture other states; `longest` as for `check_target`."""
    check_target(target, longest, client, info)
    if info.aux_layer_ids != target.aux_layer_ids:
        found = f"{list(info.aux_layer_ids)}, not {list(target.aux_layer_ids)}"
        raise _other_server(client, "aux layer ids are", found)
    if (info.num_layers, info.hidden_size) != (target.parts.num_layers, target.parts.hidden_size):
        raise _other_server(client, "target has", f"{info.num_layers} layers of {info.hidden_size}")


def _other_server(client: VllmClient, what: str, found: str) -> UserError:
    remedy = f"Its {what} {found}; start it with scripts/serve_target and the recipe of this run."
    return UserError("vllm.servers", client.name, remedy)


def _sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Return the fields of a completion request; none is left to the model's settings."""
    drawn: dict[str, Any] = {}
    if sampling.temperature:
        drawn = {
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
        }
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


def _reason(response: httpx.Response) -> str:
    try:
        error = response.json()
        return str(error.get("error", error).get("message", response.text))[:500]
    except (json.JSONDecodeError, AttributeError):
        return response.text[:500]
