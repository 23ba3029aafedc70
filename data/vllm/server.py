"""A vLLM server, asked by token ids."""

import json
from typing import Any

import httpx

from data.vllm.endpoint import Refused, Unavailable, connector_answer
from eagle31.errors import UserError

_CONNECT_SECONDS, _ANSWER_SECONDS = 10.0, 600.0
_REFUSALS = (400, 413, 422)  # of a prompt; the other 4xx are the server's way of saying that we are wrong


class VllmServer:
    """`python -m vllm.entrypoints.openai.api_server`, as scripts/serve_target starts it.

    Raises:
        UserError: `url` is none.
    """

    def __init__(self, url: str, concurrency: int) -> None:
        if not url.startswith(("http://", "https://")):
            remedy = "Give the server's address, such as http://127.0.0.1:8000."
            raise UserError("vllm.servers", url, remedy)
        self.name = url.rstrip("/").removesuffix("/v1")
        self.concurrency = concurrency
        self._model: str | None = None
        self._client = httpx.AsyncClient(
            base_url=self.name,
            timeout=httpx.Timeout(_ANSWER_SECONDS, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            trust_env=False,
        )

    async def send(self, input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        if self._model is None:
            self._model = (await self._request("GET", "/v1/models"))["data"][0]["id"]
        body = {
            "model": self._model,
            "prompt": input_ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "kv_transfer_params": params,
        }
        answer = await self._request("POST", "/v1/completions", body)
        return connector_answer(answer.get("kv_transfer_params"))

    async def close(self) -> None:
        await self._client.aclose()

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = await self._client.request(method, path, json=body)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            self._model = None
            raise Unavailable(f"No server answers there ({error}).") from error
        except httpx.TransportError as error:
            self._model = None
            raise Unavailable(f"The server went away ({error!r}).", lost=True) from error
        status = response.status_code
        if status in _REFUSALS:
            raise Refused(_reason(response))
        if status == 429 or status >= 500:
            raise Unavailable(f"The server says {status}: {_reason(response)}", lost=status >= 500)
        if status >= 400:
            raise UserError("vllm.servers", self.name + path, f"Says {status}: {_reason(response)}")
        return response.json()


def _reason(response: httpx.Response) -> str:
    try:
        error = response.json()
        return str(error.get("error", error).get("message", response.text))[:500]
    except (json.JSONDecodeError, AttributeError):
        return response.text[:500]
