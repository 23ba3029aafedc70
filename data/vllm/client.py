"""The missing samples of a store, captured by vLLM."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.capture.offline import StoreSpec, check_space, finish_store, open_store, store_fields
from data.capture.tokens import TokenRows, dataset_lengths
from data.progress import Progress
from data.store.shards import FinishedShards, refuse
from data.vllm.capture_request import CaptureRequest, below, store_destination
from data.vllm.dispatch import PATIENCE_SECONDS, Dispatcher, Prompt
from data.vllm.endpoint import Endpoint, ExpectedTarget, check_target, other_server
from data.vllm.server_info import ServerInfo, info_path
from eagle31.errors import UserError

_POLL_SECONDS = 0.5
_READ_AHEAD = 4  # prompts waiting, for each that is under way
_REFUSER = "client"


@dataclass(frozen=True)
class ExpectedStates(ExpectedTarget):
    """What every server has to give; has what `check_space` asks for."""

    aux_layer_ids: tuple[int, ...]
    hidden_size: int
    num_layers: int


def capture_through_vllm(
    stores: Sequence[StoreSpec],
    wanted: ExpectedStates,
    endpoints: Sequence[Endpoint],
    *,
    shard_tokens: int,
    manifest_fields: Mapping[str, Any],
    rank: int = 0,
    progress: bool = False,
    patience_seconds: float = PATIENCE_SECONDS,
) -> None:
    """Has every missing sample captured, store by store; returns once all are finished.

    Rank 0 sends the prompts, the others wait for the end. What servers lose is sent again, and what they
    refuse is recorded as such.

    Args:
        endpoints: used by this call alone, which closes them.
        manifest_fields: JSON values that say what the states are made with.

    Raises:
        UserError: the disk cannot hold the stores, a directory holds another one, a server is not what is
            needed, or none has been there for `patience_seconds`. What is finished by then is kept.
    """
    fields = [store_fields(store, manifest_fields) for store in stores]
    captures = []
    for store, own in zip(stores, fields, strict=True):
        missing = open_store(store.directory, own, rank)
        if rank == 0 and missing:
            check_space(store, missing, wanted)
            captures.append(_Capture(store, wanted, missing, shard_tokens))
    if captures:
        total = sum(capture.lengths[i] for capture in captures for i in capture.unsent)
        with Progress("capture", total, "tokens", shown=progress) as bar:
            asyncio.run(_run_all(captures, endpoints, bar, patience_seconds))
    for store, own in zip(stores, fields, strict=True):
        finish_store(store, own, rank, progress=progress and rank == 0)


async def _run_all(
    captures: Sequence["_Capture"], endpoints: Sequence[Endpoint], bar: Progress, patience_seconds: float
) -> None:
    try:
        for capture in captures:
            await capture.run(endpoints, bar, patience_seconds)
    finally:
        for endpoint in endpoints:
            await endpoint.close()


def check_server(
    endpoint: Endpoint, facts: ServerInfo, wanted: ExpectedStates, directory: Path | None, longest: int
) -> None:
    """Raises UserError for a server that would capture something else, or elsewhere.

    Args:
        directory: a store's or a spool's; None for a transport that has none.
        longest: tokens of the longest sample.
    """

    check_target(endpoint, facts, wanted, longest)
    if facts.aux_layer_ids != wanted.aux_layer_ids:
        found = f"{list(facts.aux_layer_ids)}, not {list(wanted.aux_layer_ids)}"
        raise other_server(endpoint, "aux layer ids are", found)
    if (facts.num_layers, facts.hidden_size) != (wanted.num_layers, wanted.hidden_size):
        raise other_server(endpoint, "target has", f"{facts.num_layers} layers of {facts.hidden_size}")
    if directory is None:
        return
    if not below(str(directory.resolve()), facts.roots):
        found = f"{', '.join(facts.roots)}, and {directory} is below none of them"
        raise other_server(endpoint, "roots are", found)
    root = next(root for root in facts.roots if below(str(directory.resolve()), [root]))
    if not info_path(root, facts.id).exists():
        remedy = f"Its {root} is another one than here; mount the same directory at the same path."
        raise UserError("vllm.servers", endpoint.name, remedy)


class _Capture:
    """What `capture_through_vllm` does for one store."""

    def __init__(
        self,
        store: StoreSpec,
        wanted: ExpectedStates,
        missing: Sequence[int],
        shard_tokens: int,
    ) -> None:
        self.lengths = dataset_lengths(store.dataset)
        self.directory = store.directory
        self.wanted = wanted
        self.tokens = TokenRows(store.dataset)
        self.destination = store_destination(store.directory, store.encoding, shard_tokens)
        # Longest first: what does not fit fails at once, and the end has no stragglers.
        self.unsent = sorted(missing, key=lambda sample_id: self.lengths[sample_id])
        self.shards = FinishedShards(store.directory)
        self.under_way: set[int] = set()
        self.answered: dict[int, str] = {}  # by which engine; not yet seen in a finished shard

    async def run(self, endpoints: Sequence[Endpoint], bar: Progress, patience_seconds: float) -> None:
        """Raises UserError as `Dispatcher.run` does."""
        longest = self.lengths[self.unsent[-1]]

        def answered(prompt: Prompt, engine: str, _: list[int]) -> None:
            self.under_way.discard(prompt.place)
            self.answered[prompt.place] = engine
            bar.update(len(prompt.input_ids))

        def refused(prompt: Prompt, reason: str) -> None:
            self.under_way.discard(prompt.place)
            refuse(self.directory, _REFUSER, prompt.place, reason)
            bar.write(f"capture: sample {prompt.place} is refused: {reason}")

        dispatcher = Dispatcher(
            endpoints,
            check=lambda endpoint, facts: check_server(endpoint, facts, self.wanted, self.directory, longest),
            answered=answered,
            refused=refused,
            patience_seconds=patience_seconds,
        )
        room = _READ_AHEAD * sum(endpoint.concurrency for endpoint in endpoints)
        running = asyncio.create_task(dispatcher.run())
        feeding = asyncio.create_task(self._feed(dispatcher, room))
        try:
            await asyncio.wait([running, feeding], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            feeding.result()
        finally:
            for task in (running, feeding):
                task.cancel()
            await asyncio.gather(running, feeding, return_exceptions=True)

    async def _feed(self, dispatcher: Dispatcher, room: int) -> None:
        """Sends what is unsent, and again what went down with an engine, until all is on disk."""
        looked = time.monotonic()
        while self.unsent or self.under_way or self.answered:
            while self.unsent and len(self.under_way) < room:
                self._send(dispatcher, room)
            await asyncio.sleep(_POLL_SECONDS if not self.unsent else _POLL_SECONDS / 10)
            if self.unsent or self.under_way or time.monotonic() - looked < _POLL_SECONDS:
                continue
            # Only what is not yet on disk keeps us here: an engine may have died with it.
            for link in dispatcher.links:
                await dispatcher.look(link)
            looked = time.monotonic()
            for record in self.shards.records():
                for sample_id in record.sample_ids:
                    self.answered.pop(sample_id, None)
            lost = [i for i, engine in self.answered.items() if engine not in dispatcher.engines]
            for sample_id in lost:
                del self.answered[sample_id]
            self.unsent += sorted(lost, key=lambda sample_id: self.lengths[sample_id])

    def _send(self, dispatcher: Dispatcher, room: int) -> None:
        ids = [self.unsent.pop() for _ in range(min(room - len(self.under_way), len(self.unsent)))]
        for sample_id, (input_ids, loss_mask) in zip(ids, self.tokens.read(ids), strict=True):
            own = input_ids.tolist()
            order = CaptureRequest.of(self.destination, str(sample_id), own, loss_mask)
            dispatcher.add(Prompt(sample_id, str(sample_id), own, order.to_params()))
            self.under_way.add(sample_id)
