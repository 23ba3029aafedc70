"""The client of an engine of TorchSpec."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import ray
import torch

from data.capture.dispatch import MAX_LOST, Completions, EngineInfo, Prompt, Unavailable
from data.capture.torchspec.transport import TorchSpecTransport
from eagle31.errors import UserError

_INFO_SECONDS = 120.0  # an engine answers once it has computed what it has
_BATCHES_AHEAD = 2  # one that is computed and one that waits in the engine
_PUT_FAILED = "batch_put_from failed"  # in what an engine raises whose states the store does not take


class TorchSpecClient:
    """A connection to an engine, which computes prompts in batches and puts their states into its store.

    Args:
        find: returns the engine's handle, which changes when it is started again.
        transport: gets the keys under which the engine has put states.
        batch_size: the most prompts in one call.
    """

    field = "torchspec.engine"
    remedy = "look into the engines' logs in OUTPUT_DIR/torchspec"

    def __init__(
        self,
        name: str,
        find: Callable[[], Any],
        info: EngineInfo,
        transport: TorchSpecTransport,
        batch_size: int,
    ) -> None:
        self.name = name
        self.concurrency = _BATCHES_AHEAD * batch_size
        self._find, self._info, self._transport = find, info, transport
        self._batch_size = batch_size
        self._engine: Any = None
        self._waiting: deque[tuple[Prompt, asyncio.Future[Completions]]] = deque()
        self._slots = asyncio.Semaphore(_BATCHES_AHEAD)

    async def info(self) -> EngineInfo:
        self._engine = await asyncio.to_thread(self._find)
        try:
            healthy = await asyncio.wait_for(self._engine.health_check.remote(), _INFO_SECONDS)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise Unavailable(f"It does not answer ({error!r}).") from error
        if not healthy:
            raise Unavailable("It has not loaded the target.")
        return self._info

    async def compute(self, prompt: Prompt) -> Completions:
        """Have the prompt's states put into the store; it joins the batch of those that wait with it."""
        done: asyncio.Future[Completions] = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt, done))
        await asyncio.sleep(0)  # the prompts of this moment make one batch
        async with self._slots:
            if any(one is done for _, one in self._waiting):
                size = min(self._batch_size, len(self._waiting))
                await self._send([self._waiting.popleft() for _ in range(size)])
        return await done

    async def close(self) -> None:
        """The engine belongs to the run."""

    async def _send(self, batch: list[tuple[Prompt, asyncio.Future[Completions]]]) -> None:
        """Compute a batch, and give each prompt's future its result.

        No sample is left out because of the store: it is sent again, and the run ends where that is in vain.
        """
        try:
            found = await self._engine.generate.remote(
                data_id=[prompt.key for prompt, _ in batch],
                input_ids_ref=[torch.tensor(prompt.input_ids) for prompt, _ in batch],
                packed_loss_mask_list=[f"0,{len(prompt.input_ids)}" for prompt, _ in batch],
            )
        except ray.exceptions.RayError as error:
            found, reason = [], str(error)
        else:
            reason = f"It gave {len(found)} of {len(batch)} samples."
        for index, (prompt, done) in enumerate(batch):
            if len(found) == len(batch):
                self._transport.announce(prompt.key, found[index]["mooncake_key"])
                done.set_result([])
            elif _PUT_FAILED in reason and prompt.num_lost + 1 >= MAX_LOST:
                remedy = (
                    f"The store did not take states of {self.name}, {MAX_LOST} times: raise capture.spool_gb "
                    "or look into the logs in OUTPUT_DIR/torchspec, and run the same command again: finished "
                    f"work is kept. {reason.strip().splitlines()[-1]}"
                )
                done.set_exception(UserError("capture", "torchspec", remedy))
            else:
                done.set_exception(Unavailable(reason, lost=True))
