"""Checks, before a run's first stage, that its servers compute what it needs and that their states arrive."""

import asyncio
import secrets
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import torch

from data.capture.dispatch import PATIENCE_SECONDS, Refused, Unavailable
from data.capture.hf import head_tolerance
from data.capture.transport.protocol import StateRequest
from data.capture.transport.spool import Spool
from data.capture.vllm.capture_request import capture_params
from data.capture.vllm.client import VllmClient
from data.capture.vllm.server_info import ServerInfo
from data.progress import LINE_SECONDS
from data.store.codec import supervised_final
from data.target.head import TargetHead
from eagle31.errors import UserError

_PAUSE_SECONDS = 2.0
_ARRIVAL_SECONDS = 60.0
_PROBE_TOKENS = 8  # of the lowest ids, none of which stands for an image


def check_servers(
    servers: Sequence[VllmClient],
    check: Callable[[VllmClient, ServerInfo], None],
    probe: Callable[[VllmClient], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Check that every server is what the run needs. Closes the connections.

    Args:
        check: raises UserError for a server that is not set up as required.
        probe: awaited with every server afterwards, such as `probe_states`.

    Raises:
        UserError: from `check` or `probe`, or a server does not answer for some minutes.
    """

    async def check_all() -> None:
        try:
            for server in servers:
                check(server, await _info(server))
                if probe is not None:
                    await probe(server)
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


async def probe_states(server: VllmClient, spool: Spool, key: str, head: TargetHead) -> None:
    """Have a server capture a few tokens, and read their states back as the capture stage and training do.

    So a path or an address that means something else on the server's node is found now, and so are states
    from which the head does not give the probabilities that the server itself gives.

    Args:
        key: the beginning of the sample's key.

    Raises:
        UserError: the states do not arrive, or the probabilities differ.
    """
    input_ids, loss_mask = torch.arange(_PROBE_TOKENS), torch.ones(_PROBE_TOKENS, dtype=torch.bool)
    request = StateRequest(f"{key}-{secrets.token_hex(8)}", input_ids, loss_mask)
    params = capture_params(spool, request)
    try:
        answer = await server.capture(input_ids.tolist(), params, prompt_logprobs=0)
    except (Refused, Unavailable) as error:
        remedy = f"It cannot deliver states to {spool.directory}: {error}"
        raise UserError("vllm.servers", server.name, remedy) from error
    sample = spool.take(request, _ARRIVAL_SECONDS)
    if sample is None:
        remedy = (
            f"It captured a test sample for {spool.directory}, which has not arrived here in "
            f"{_ARRIVAL_SECONDS:.0f} seconds; see its log. Give capture.spool_dir=DIRECTORY, one that both "
            "machines mount at the same path."
        )
        raise UserError("vllm.servers", server.name, remedy)
    compared = supervised_final(loss_mask).nonzero()[:, 0]
    found = answer["choices"][0]["prompt_logprobs"]
    theirs = torch.tensor([found[i + 1][str(i + 1)]["logprob"] for i in compared.tolist()])
    with torch.inference_mode():
        logits = head(sample.final_hidden_states[compared].to(head.weight.device)).float().cpu()
    ours = logits.log_softmax(-1).gather(1, compared[:, None] + 1)[:, 0]
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    if not difference <= head_tolerance(head.weight.dtype, sample.final_hidden_states.dtype):
        remedy = (
            f"It gives tokens log-probabilities that differ by {difference:.1%} of the largest from those of "
            "the target's head on its states: they are not the states that its head reads. Set capture=hf or "
            "choose another target."
        )
        raise UserError("vllm.servers", server.name, remedy)
