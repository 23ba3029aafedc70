"""The dispatcher, which keeps any number of endpoints busy with prompts and survives their failures."""

import asyncio
import itertools
import math
import random
import secrets
import time
from collections.abc import Callable, Sequence

from data.sampling import Sampling
from data.vllm.capture_request import with_client
from data.vllm.endpoint import DestinationFailed, Endpoint, Refused, Unavailable, describe
from data.vllm.link import Link, Origin, Prompt
from data.vllm.server_info import ServerInfo
from eagle31.errors import UserError

PATIENCE_SECONDS = 300.0  # time to start a server again and load its model
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 5.0
# A prompt that gets no answer from engines that live, as after a proxy, is sent again after pauses that
# become longer, for five minutes in all.
_MAX_INTERRUPTED, _LONGEST_INTERRUPTION_SECONDS = 16, 30.0
_EXPLAINED_SECONDS = 1.0  # between looks at a prompt that is not sent before its losses are explained


class Dispatcher:
    """Sends prompts to any endpoint with capacity, and sends those again that get no answer.

    A prompt is refused where the endpoint says so, where three engines have ended with it, two of them while
    it was the only one under way, and where living engines, as after a proxy, have given no answer for five
    minutes. Whether an engine has ended is known when its endpoint answers again.

    Args:
        check: raises UserError for an engine that is not set up as required.
        answered: called with the prompt, where its answer came from, and the completion's token ids where one
            was requested.
        refused: called with the prompt and the reason.
        patience_seconds: how long all endpoints may be down at once.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        check: Callable[[Endpoint, ServerInfo], None],
        answered: Callable[[Prompt, Origin, list[int]], None],
        refused: Callable[[Prompt, str], None],
        patience_seconds: float,
    ) -> None:
        self.links = [Link(endpoint) for endpoint in endpoints]
        self.patience_seconds = patience_seconds
        self.num_under_way = 0  # prompts that were sent, or are about to be, and have no answer
        self._sends = True
        self._check, self._answered, self._refused = check, answered, refused
        self._client = secrets.token_hex(8)
        self._prompts: asyncio.PriorityQueue[tuple[tuple[bool, int, int], int, Prompt]]
        self._prompts = asyncio.PriorityQueue()
        self._added = itertools.count()  # makes every item of the queue differ before its prompt
        self._heard_at: dict[str, float] = {}  # when each engine answered last

    def add(self, prompt: Prompt) -> None:
        self._prompts.put_nowait((prompt.rank, next(self._added), prompt))

    def stop_sending(self) -> None:
        """Send nothing more, neither what waits nor what gets no answer. Only `run`'s thread may call."""
        self._sends = False

    def is_lost(self, origin: Origin) -> bool:
        """Return whether an engine may have ended before it wrote the states of what it had answered.

        That is so once its endpoint has gone down, until the engine answers again. An engine that another one
        hides, after a load balancer, is not lost.
        """
        return self._heard_at.get(origin.engine, -math.inf) <= origin.link.failed_at

    def doubt(self, origin: Origin) -> None:
        """Have the endpoint looked at soon, although it is up. Any thread may call this."""
        origin.link.doubted = True

    def give_up(self, origin: Origin) -> None:
        """Count an engine as lost whose states have not come."""
        self._heard_at.pop(origin.engine, None)

    async def run(self) -> None:
        """Send prompts until this is cancelled.

        Raises:
            UserError: an endpoint is not set up as required or could not write what it was sent, or none has
                been up for too long.
        """
        tasks = [asyncio.create_task(self._keep_up(link)) for link in self.links]
        for link in self.links:
            tasks += [asyncio.create_task(self._work(link)) for _ in range(link.endpoint.concurrency)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def look(self, link: Link) -> None:
        """Find out whether the endpoint is up and which engine it is.

        Raises:
            UserError: it is not set up as required, or could not write what this dispatcher had sent.
        """
        try:
            info = await describe(link.endpoint, self._client, flush=True)
        except Unavailable as error:
            link.went_down(str(error))
            return
        except DestinationFailed as error:
            raise _not_written(link, error) from error
        except Refused as error:
            raise UserError("vllm.servers", link.endpoint.name, str(error)) from error
        self._check_engine(link, info)
        if link.is_up and info.id not in link.engines:
            link.went_down("another engine answers")
        link.went_up(info)

    def _check_engine(self, link: Link, info: ServerInfo) -> None:
        if info.id not in link.engines:
            self._check(link.endpoint, info)
        self._heard_at[info.id] = time.monotonic()

    async def _keep_up(self, link: Link) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while True:
            if link.is_up and not link.doubted:
                pause = _FIRST_PAUSE_SECONDS
                await asyncio.sleep(_FIRST_PAUSE_SECONDS)
                continue
            link.doubted = False
            await self.look(link)
            if not link.is_up:
                self._check_patience()
                if link.down_since is not None and time.monotonic() - link.down_since > self.patience_seconds:
                    link.explain_losses(lambda loss: loss.broken)
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _work(self, link: Link) -> None:
        while True:
            await link.until_up()
            *_, prompt = await self._prompts.get()
            if prompt.withdrawn or not self._sends:
                continue
            if not link.is_up:
                self.add(prompt)
                continue
            if prompt.awaits_explanation:
                self._add_later(prompt, _EXPLAINED_SECONDS)
                continue
            assert link.info is not None
            reason = _hopeless(prompt) or _impossible(prompt, link.info)
            if reason is not None:
                self._refused(prompt, reason)
                continue
            alone = prompt.is_suspect
            self.num_under_way += 1
            try:
                async with link.turn(alone):
                    info, output_ids = await self._compute(link.endpoint, prompt)
                info = info or link.info
                self._check_engine(link, info)
                link.note_engine(info)
                self._answered(prompt, Origin(info.id, link), output_ids)
            except DestinationFailed as error:
                raise _not_written(link, error) from error
            except Refused as error:
                self._refused(prompt, str(error))
            except Unavailable as error:
                link.went_down(str(error))
                if error.lost:
                    link.note_loss(prompt, alone, error)
                pause = _FIRST_PAUSE_SECONDS * 2.0**prompt.num_interrupted if prompt.num_interrupted else 0.0
                self._add_later(prompt, min(pause, _LONGEST_INTERRUPTION_SECONDS))
            finally:
                self.num_under_way -= 1

    def _add_later(self, prompt: Prompt, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self.add, prompt)

    async def _compute(self, endpoint: Endpoint, prompt: Prompt) -> tuple[ServerInfo | None, list[int]]:
        """Return the info of the engine that computed a prompt, if it tells, and the completion."""
        if isinstance(prompt.task, Sampling):
            return None, await endpoint.generate(prompt.input_ids, prompt.task)
        answer = await endpoint.send(prompt.input_ids, with_client(prompt.task, self._client))
        return ServerInfo.from_json(answer["engine"]) if "engine" in answer else None, []

    def _check_patience(self) -> None:
        since = [link.down_since for link in self.links if link.down_since is not None]
        if len(since) < len(self.links) or time.monotonic() - max(since) < self.patience_seconds:
            return
        reasons = "; ".join(f"{link.endpoint.name}: {link.reason}" for link in self.links)
        remedy = (
            f"No server has answered for {self.patience_seconds:.0f} seconds ({reasons}); start them with "
            "scripts/serve_target and run the same command again: finished work is kept."
        )
        raise UserError("vllm.servers", [link.endpoint.name for link in self.links], remedy)


def _not_written(link: Link, error: DestinationFailed) -> UserError:
    remedy = f"It could not write the states: {error} Finished work is kept."
    return UserError("vllm.servers", link.endpoint.name, remedy)


def _hopeless(prompt: Prompt) -> str | None:
    """Return why a prompt that got no answer is not sent again, or None."""
    if prompt.ends_engines:
        return f"It ended the engine {prompt.num_ended} times, even when sent alone."
    if prompt.num_interrupted >= _MAX_INTERRUPTED:
        return (
            f"It was sent {prompt.num_interrupted} times to engines that live, and no answer came: "
            "a proxy or a time limit ends such requests."
        )
    return None


def _impossible(prompt: Prompt, info: ServerInfo) -> str | None:
    """Return why an engine cannot compute a prompt, or None. Some of these would end it."""
    largest = max(prompt.input_ids, default=-1)
    if not 0 <= min(prompt.input_ids, default=-1) <= largest < info.vocab_size:
        return f"It has no tokens, or one outside the target's {info.vocab_size}: {largest}."
    new_tokens = prompt.task.max_new_tokens if isinstance(prompt.task, Sampling) else 0
    if len(prompt.input_ids) + new_tokens > info.max_tokens:
        tokens = f"{len(prompt.input_ids)} tokens" + (
            f" and {new_tokens} of its answer" if new_tokens else ""
        )
        return f"Its {tokens} are more than the {info.max_tokens} that vLLM was started for."
    return None
