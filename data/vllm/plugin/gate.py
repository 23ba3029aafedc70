"""The gate in front of vLLM's HTTP server: which requests it lets through."""

import hashlib
import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from data.processes.supervisor import ANSWERED_FD
from data.vllm.environment import KEY_VARIABLE
from data.vllm.server_info import INFO_PATH, engine_info

_HEALTH_PATH, _COMPLETIONS_PATH = "/health", "/v1/completions"
# vLLM's own key does not protect /invocations, which takes the same requests as /v1/completions.
_PATHS = (_HEALTH_PATH, _COMPLETIONS_PATH, INFO_PATH, "/v1/models", "/metrics")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Gate:
    """ASGI middleware that demands the key and lets only the paths through that a run needs.

    The key is read from VLLM_API_KEY. Without one, everybody who reaches the server may use it. `/health`
    needs no key. `/v1/eagle31` gives the server info of an engine without the connector.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        key = os.environ.get(KEY_VARIABLE)
        self._digest = None if not key else hashlib.sha256(key.encode()).digest()
        self._answered_fd = os.environ.get(ANSWERED_FD)

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
            name = f"{os.uname().nodename}-{os.getpid()}"
            await _answer(send, 200, engine_info(scope["app"].state.vllm_config, name).to_json())
        else:
            await self._app(scope, receive, self._noting(scope, send))

    def _has_key(self, scope: Message) -> bool:
        if self._digest is None:
            return True
        for name, value in scope["headers"]:
            scheme, _, key = value.partition(b" ")
            if name.lower() == b"authorization" and scheme.lower() == b"bearer":
                return secrets.compare_digest(hashlib.sha256(key).digest(), self._digest)
        return False

    def _noting(self, scope: Message, send: Send) -> Send:
        """Return `send`, which also reports the first completion to the supervisor."""
        if self._answered_fd is None or scope["path"] != _COMPLETIONS_PATH:
            return send

        async def send_and_note(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.start" and message["status"] == 200 and self._answered_fd:
                os.write(int(self._answered_fd), b"a")
                self._answered_fd = None

        return send_and_note


async def _answer(send: Send, status: int, content: Message) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
