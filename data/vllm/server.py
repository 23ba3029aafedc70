"""A vLLM server as an endpoint."""

import json
import os
from collections.abc import Callable
from typing import Any

import httpx

from data.sampling import Sampling
from data.vllm.capture_request import asks_for_info
from data.vllm.endpoint import Refused, Unavailable, check_finished, connector_answer, sampling_fields
from data.vllm.environment import KEY_VARIABLE
from data.vllm.server_info import INFO_PATH
from eagle31.errors import UserError

_CONNECT_SECONDS, _ANSWER_SECONDS = 10.0, 600.0
_NAMES_SECONDS = 60.0  # for the models' names, which wait for no prompt
_TOKEN_SECONDS = 0.5  # per token of a completion, at most, by a loaded server
_NO_ENTRY = (401, 403)
_LATER = (408, 425, 429)
_PROXY = (502, 503, 504)  # what a proxy answers for a server that it does not reach, or in time
_REFUSALS = (400, 413, 422)  # refuse a prompt; the other 4xx mean that our request is wrong
_OTHER = "Give the address of a server that scripts/serve_target has started."


class _NotFound(Exception):
    """The server has no such path."""


class VllmServer:
    """An `Endpoint`: a vLLM server that scripts/serve_target or this run starts.

    Args:
        concurrency: the number of prompts under way.
        key: the server's key, sent as a bearer token; None takes it from VLLM_API_KEY, if that is set.
        check: called when the server does not answer; raises UserError where it never will.

    Raises:
        UserError: `url` is not a URL.
    """

    def __init__(
        self,
        url: str,
        concurrency: int,
        key: str | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            remedy = "Give the server's address, such as http://127.0.0.1:8000."
            raise UserError("vllm.servers", url, remedy)
        self.name = url.rstrip("/").removesuffix("/v1")
        self.concurrency = concurrency
        self._model: str | None = None
        self._check = check
        key = key or os.environ.get(KEY_VARIABLE)
        self._client = httpx.AsyncClient(
            base_url=self.name,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            trust_env=False,
        )

    async def send(self, input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        body = {"max_tokens": 1, "temperature": 0.0, "kv_transfer_params": params}
        answer = await self._complete(input_ids, body, _ANSWER_SECONDS)
        if asks_for_info(params) and answer.get("kv_transfer_params") is None:
            return await self._info_without_connector()
        return connector_answer(answer.get("kv_transfer_params"))

    async def generate(self, input_ids: list[int], sampling: Sampling) -> list[int]:
        body = sampling_fields(sampling) | {"return_token_ids": True}
        seconds = _ANSWER_SECONDS + _TOKEN_SECONDS * sampling.max_new_tokens
        (choice,) = (await self._complete(input_ids, body, seconds))["choices"]
        check_finished(choice["finish_reason"])
        return choice["token_ids"]

    async def close(self) -> None:
        await self._client.aclose()

    async def _info_without_connector(self) -> dict[str, Any]:
        try:
            return await self._request("GET", INFO_PATH)
        except _NotFound:
            return {}

    async def _complete(self, input_ids: list[int], fields: dict[str, Any], seconds: float) -> dict[str, Any]:
        if self._model is None:
            answer = await self._request("GET", "/v1/models", seconds=_NAMES_SECONDS)
            try:
                self._model = str(answer["data"][0]["id"])
            except (TypeError, KeyError, IndexError):
                raise UserError("vllm.servers", self.name, f"It names no model. {_OTHER}") from None
        body = {"model": self._model, "prompt": input_ids, **fields}
        return await self._request("POST", "/v1/completions", body, seconds)

    async def _request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        seconds: float = _ANSWER_SECONDS,
    ) -> dict[str, Any]:
        timeout = httpx.Timeout(seconds, connect=_CONNECT_SECONDS)
        try:
            response = await self._client.request(method, path, json=body, timeout=timeout)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            self._model = None
            self._check()
            raise Unavailable(f"No server answers at this address ({error}).") from error
        except httpx.TransportError as error:
            self._model = None
            self._check()
            broken = not isinstance(error, httpx.TimeoutException)
            reason = f"The connection to the server broke ({error!r})."
            raise Unavailable(reason, lost=True, broken=broken) from error
        status = response.status_code
        if status in _REFUSALS:
            raise Refused(_reason(response))
        if status in _LATER or status >= 500:
            reason = f"The server answered {status}: {_reason(response)}"
            raise Unavailable(reason, lost=status >= 500, broken=status >= 500 and status not in _PROXY)
        if status in _NO_ENTRY:
            remedy = f"It demands another key; set {KEY_VARIABLE} to the key that it was started with."
            raise UserError("vllm.servers", self.name, remedy)
        if status == 404 and path == INFO_PATH:
            raise _NotFound
        if status >= 400:
            remedy = f"It answered {status}: {_reason(response)} {_OTHER}"
            raise UserError("vllm.servers", self.name + path, remedy)
        try:
            return response.json()
        except json.JSONDecodeError as error:
            raise Unavailable(f"The answer is no JSON: {response.text[:200]}", lost=True) from error


def _reason(response: httpx.Response) -> str:
    try:
        error = response.json()
        return str(error.get("error", error).get("message", response.text))[:500]
    except (json.JSONDecodeError, AttributeError):
        return response.text[:500]
