"""Checks, before a run's first stage, that its servers compute what it needs and that their states arrive."""

import asyncio
import secrets
import sys
import time
from collections.abc import Callable, Sequence

import torch

from data.capture.dispatch import PATIENCE_SECONDS, Refused, Unavailable
from data.capture.transport.protocol import StateRequest, Transport
from data.capture.vllm.capture_request import CaptureRequest
from data.capture.vllm.client import VllmClient
from data.capture.vllm.server_info import ServerInfo
from data.progress import LINE_SECONDS
from eagle31.errors import UserError

_PAUSE_SECONDS = 2.0
_ARRIVAL_SECONDS = 60.0


def check_servers(
    servers: Sequence[VllmClient],
    check: Callable[[VllmClient, ServerInfo], None],
    transport: Transport | None,
    key: str,
) -> None:
    """Check that every server is what the run needs, and that its states arrive here. Closes the connections.

    With a transport, a sample of two tokens is captured by each server and read back, as the capture stage
    and training do it. So a path or an address that means something else on the server's node is found now.

    Args:
        check: raises UserError for a server that is not set up as required.
        key: the beginning of the samples' keys.

    Raises:
        UserError: from `check`, or a server does not answer for some minutes, or its states do not arrive.
    """

    async def check_all() -> None:
        try:
            for server in servers:
                check(server, await _info(server))
                if transport is not None:
                    await _probe(server, transport, key)
        finally:
            for server in servers:
                await server.close()

    asyncio.run(check_all())


async def _info(server: VllmClient) -> ServerInfo:
    """Return what the server runs; wait for one that does not answer, and say so now and then."""
    started = next_line = time.monotonic()
    while True:
        try:
            return await server.info()
        except Unavailable as error:
            now = time.monotonic()
            if now - started > PATIENCE_SECONDS:
                waited = f"It did not answer for {PATIENCE_SECONDS:.0f} seconds ({error})"
                remedy = f"{waited}; start it with scripts/serve_target."
                raise UserError("vllm.servers", server.name, remedy) from error
            if now >= next_line:
                next_line = now + LINE_SECONDS
                limit = f"{now - started:.0f} s of at most {PATIENCE_SECONDS:.0f} s"
                print(f"vllm: waiting for {server.name}, {limit} ({error})", file=sys.stderr, flush=True)
            await asyncio.sleep(_PAUSE_SECONDS)


async def _probe(server: VllmClient, transport: Transport, key: str) -> None:
    input_ids, loss_mask = torch.tensor([0, 0]), torch.tensor([False, True])
    request = StateRequest(f"{key}-{secrets.token_hex(8)}", input_ids, loss_mask)
    where = transport.to_json()
    capture = CaptureRequest.of(where, request.key, input_ids.tolist(), loss_mask)
    place = where["mooncake"]["master"] if "mooncake" in where else where["spool"]
    try:
        await server.capture(input_ids.tolist(), capture.to_params())
    except (Refused, Unavailable) as error:
        remedy = f"It cannot deliver states to {place}: {error}"
        raise UserError("vllm.servers", server.name, remedy) from error
    if transport.take(request, _ARRIVAL_SECONDS) is None:
        remedy = (
            f"It captured a test sample for {place}, which has not arrived here in {_ARRIVAL_SECONDS:.0f} "
            "seconds; see its log. Give a directory that both machines mount at the same path, or set "
            "capture.transport=mooncake."
        )
        raise UserError("vllm.servers", server.name, remedy)
