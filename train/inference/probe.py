"""Checks, before a run's first stage, that its servers compute what it needs and that their states arrive."""

import asyncio
import secrets
import sys
import time
from collections.abc import Callable, Sequence

import torch

from data.progress import FIRST_LINE_SECONDS, LINE_SECONDS
from data.transport.protocol import StateRequest, Transport
from data.vllm.capture_request import CaptureRequest, with_client
from data.vllm.dispatch import PATIENCE_SECONDS
from data.vllm.endpoint import Endpoint, Refused, Unavailable, describe
from data.vllm.server import VllmServer
from data.vllm.server_info import ServerInfo
from eagle31.errors import UserError

_PAUSE_SECONDS = 2.0
_ARRIVAL_SECONDS = 60.0


def check_servers(
    servers: Sequence[VllmServer],
    check: Callable[[Endpoint, ServerInfo], None],
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
                check(server, await _description(server))
                if transport is not None:
                    await _probe(server, transport, key)
        finally:
            for server in servers:
                await server.close()

    asyncio.run(check_all())


async def _description(server: VllmServer) -> ServerInfo:
    waiting = _Waiting(server.name)
    while True:
        asking = asyncio.ensure_future(describe(server))
        try:
            while not (await asyncio.wait([asking], timeout=FIRST_LINE_SECONDS))[0]:
                waiting.report("it is connected and says nothing")
            return asking.result()
        except Unavailable as error:
            if waiting.seconds > PATIENCE_SECONDS:
                waited = f"It did not answer for {PATIENCE_SECONDS:.0f} seconds ({error})"
                remedy = f"{waited}; start it with scripts/serve_target."
                raise UserError("vllm.servers", server.name, remedy) from error
            waiting.report(str(error))
            await asyncio.sleep(_PAUSE_SECONDS)
        except Refused as error:
            raise UserError("vllm.servers", server.name, str(error)) from error
        finally:
            asking.cancel()


class _Waiting:
    """The wait for a server that does not answer, which is reported at once and then now and then."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = self._next_line = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def report(self, reason: str) -> None:
        """Print a line if the last one was long ago."""
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_SECONDS
            limit = f"{self.seconds:.0f} s of at most {PATIENCE_SECONDS:.0f} s"
            print(f"vllm: waiting for {self._name}, {limit} ({reason})", file=sys.stderr, flush=True)


async def _probe(server: VllmServer, transport: Transport, key: str) -> None:
    input_ids, loss_mask = torch.tensor([0, 0]), torch.tensor([False, True])
    request = StateRequest(f"{key}-{secrets.token_hex(8)}", input_ids, loss_mask)
    capture = CaptureRequest.of(transport.to_json(), request.key, input_ids.tolist(), loss_mask)
    where, client = transport.to_json(), secrets.token_hex(8)
    place = where["mooncake"]["master"] if "mooncake" in where else where["spool"]
    try:
        await server.send(input_ids.tolist(), with_client(capture.to_params(), client))
        sample = transport.take(request, _ARRIVAL_SECONDS)
        if sample is None:
            await describe(server, client)  # it may know why
    except (Refused, Unavailable) as error:
        raise UserError(
            "vllm.servers", server.name, f"It cannot deliver states to {place}: {error}"
        ) from error
    if sample is None:
        remedy = (
            f"It wrote a test sample to {place}, which has not arrived here in {_ARRIVAL_SECONDS:.0f} "
            "seconds; give a directory that both machines mount at the same path, or set "
            "capture.transport=mooncake."
        )
        raise UserError("vllm.servers", server.name, remedy)
