"""The gate in front of vLLM's HTTP server: which requests it lets through."""

import hashlib
import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from data.capture.vllm.environment import KEY_VARIABLE
from data.capture.vllm.server_info import INFO_PATH, ServerInfo

_HEALTH_PATH = "/health"
# vLLM's own key does not protect /invocations, which takes the same requests as /v1/completions.
_PATHS = (_HEALTH_PATH, "/v1/completions", INFO_PATH, "/metrics")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Gate:
    """ASGI middleware that demands the key and lets only the paths through that a run needs.

    The key is read from VLLM_API_KEY. Without one, everybody who reaches the server may use it. `/health`
    needs no key. `/v1/eagle31` gives the server info.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        key = os.environ.get(KEY_VARIABLE)
        self._digest = None if not key else hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] == _HEALTH_PATH:
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close"})
        elif not self._has_key(scope):
            await _answer(send, 401, {"error": {"message": "The key is missing or wrong."}})
        elif scope["path"] not in _PATHS:
            await _answer(send, 404, {"error": {"message": "This server has no such path."}})
        elif scope["path"] == INFO_PATH:
            await _answer(send, 200, ServerInfo.of(scope["app"].state.vllm_config).to_json())
        else:
            await self._app(scope, receive, send)

    def _has_key(self, scope: Message) -> bool:
        if self._digest is None:
            return True
        for name, value in scope["headers"]:
            scheme, _, key = value.partition(b" ")
            if name.lower() == b"authorization" and scheme.lower() == b"bearer":
                return secrets.compare_digest(hashlib.sha256(key).digest(), self._digest)
        return False


async def _answer(send: Send, status: int, content: Message) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
