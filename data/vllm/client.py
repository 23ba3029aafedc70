"""Capture of a store's missing samples by vLLM."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.capture.finishing import finish_store
from data.capture.meter import CaptureMeter
from data.capture.opening import StoreSpec, check_space, check_store_refusals, open_store, store_fields
from data.capture.refusals import check_refusals, retry_remedy
from data.capture.tokens import TokenRows, dataset_lengths
from data.progress import Progress
from data.store.shards import FinishedShards, refuse
from data.vllm.capture_request import CaptureRequest
from data.vllm.destinations import below, store_destination
from data.vllm.dispatch import PATIENCE_SECONDS, Dispatcher, Origin, Prompt
from data.vllm.endpoint import Endpoint, ExpectedTarget, check_target, other_server
from data.vllm.server_info import ServerInfo, info_path
from eagle31.errors import UserError

_POLL_SECONDS = 0.5
_READ_AHEAD = 4  # prompts in memory per prompt under way
_REFUSER = "client"
# An engine writes what it has answered within seconds. After this time without a new state on disk, all that
# are missing are requested again, this often at most.
_OVERDUE_SECONDS, _MAX_OVERDUE = 60.0, 3


@dataclass(frozen=True)
class ExpectedStates(ExpectedTarget):
    """The states that every server must give. It is a `CapturedStates`."""

    aux_layer_ids: tuple[int, ...]
    hidden_size: int
    num_layers: int


def capture_through_vllm(
    stores: Sequence[StoreSpec],
    expected: ExpectedStates,
    endpoints: Sequence[Endpoint],
    *,
    shard_tokens: int,
    manifest_fields: Mapping[str, Any],
    rank: int = 0,
    progress: bool = False,
    patience_seconds: float = PATIENCE_SECONDS,
) -> None:
    """Capture every missing sample, store by store, and return once all stores are finished.

    Rank 0 sends the prompts, and the other ranks wait. Prompts that a server loses are sent again, and those
    that a server refuses are recorded.

    Args:
        endpoints: used by this call only, which closes them.
        manifest_fields: JSON values that describe how the states were made.

    Raises:
        UserError: the disk cannot hold the stores, a directory holds another store, a server is not suitable,
            too many samples are refused, or no server has answered for `patience_seconds`. Finished shards
            are kept.
    """
    fields = [store_fields(store, manifest_fields) for store in stores]
    captures = []
    for store, store_manifest in zip(stores, fields, strict=True):
        missing = open_store(store.directory, store_manifest, rank)
        if rank == 0 and missing:
            already_refused = check_store_refusals(store)
            check_space(store, missing, expected)
            captures.append(_StoreCapture(store, expected, missing, already_refused, shard_tokens))
    if captures:
        total = sum(capture.lengths[i] for capture in captures for i in capture.unsent)
        meter = CaptureMeter(total, captures[0].directory)
        with Progress("capture", total, "tokens", shown=progress) as bar:
            asyncio.run(_run_all(captures, endpoints, bar, meter, patience_seconds))
    for store, store_manifest in zip(stores, fields, strict=True):
        finish_store(store, store_manifest, rank, progress=progress and rank == 0)


async def _run_all(
    captures: Sequence["_StoreCapture"],
    endpoints: Sequence[Endpoint],
    bar: Progress,
    meter: CaptureMeter,
    patience_seconds: float,
) -> None:
    try:
        for capture in captures:
            await capture.run(endpoints, bar, meter, patience_seconds)
    finally:
        for endpoint in endpoints:
            await endpoint.close()


def check_server(
    endpoint: Endpoint, info: ServerInfo, expected: ExpectedStates, directory: Path | None, longest: int
) -> None:
    """Raise UserError for a server that would capture other states, or write them elsewhere.

    Args:
        directory: the store's or the spool's directory; None for a transport without one.
        longest: the number of tokens of the longest sample.
    """
    check_target(endpoint, info, expected, longest)
    if info.aux_layer_ids != expected.aux_layer_ids:
        found = f"{list(info.aux_layer_ids)}, not {list(expected.aux_layer_ids)}"
        raise other_server(endpoint, "aux layer ids are", found)
    if (info.num_layers, info.hidden_size) != (expected.num_layers, expected.hidden_size):
        raise other_server(endpoint, "target has", f"{info.num_layers} layers of {info.hidden_size}")
    if directory is None:
        return
    if not below(str(directory.resolve()), info.roots):
        found = f"{', '.join(info.roots)}, and {directory} is below none of them"
        raise other_server(endpoint, "roots are", found)
    root = next(root for root in info.roots if below(str(directory.resolve()), [root]))
    if not info_path(root, info.id).exists():
        remedy = f"Its {root} is not the directory of this machine; mount the same one at the same path."
        raise UserError("vllm.servers", endpoint.name, remedy)


class _StoreCapture:
    """The capture of one store."""

    def __init__(
        self,
        store: StoreSpec,
        expected: ExpectedStates,
        missing: Sequence[int],
        already_refused: Mapping[int, str],
        shard_tokens: int,
    ) -> None:
        self.store = store
        self.refused = dict(already_refused)
        self.lengths = dataset_lengths(store.dataset)
        self.directory = store.directory
        self.expected = expected
        self.tokens = TokenRows(store.dataset)
        self.destination = store_destination(store.directory, store.encoding, shard_tokens)
        # The longest come first: what does not fit fails at once, and the end has no stragglers.
        self.unsent = sorted(missing, key=lambda sample_id: self.lengths[sample_id])
        self.shards = FinishedShards(store.directory)
        self.under_way: set[int] = set()
        self.answered: dict[int, Origin] = {}  # samples not yet seen in a finished shard
        self.progressed = time.monotonic()  # when the last sample was answered or seen in a finished shard
        self.num_overdue = 0

    async def run(
        self, endpoints: Sequence[Endpoint], bar: Progress, meter: CaptureMeter, patience_seconds: float
    ) -> None:
        """Capture the store's samples; raise UserError as `Dispatcher.run` does."""
        longest = self.lengths[self.unsent[-1]]

        def report() -> None:
            meter.num_queued, meter.num_refused = len(self.under_way), len(self.refused)
            bar.note(meter.line)

        def answered(prompt: Prompt, origin: Origin, _: list[int]) -> None:
            self.under_way.discard(prompt.index)
            self.answered[prompt.index] = origin
            self.progressed = time.monotonic()
            meter.captured(origin.link.endpoint.name, len(prompt.input_ids))
            report()
            bar.update(len(prompt.input_ids))

        def refused(prompt: Prompt, reason: str) -> None:
            self.under_way.discard(prompt.index)
            refuse(self.directory, _REFUSER, prompt.index, reason)
            bar.write(f"capture: sample {prompt.index} was refused: {reason}")
            self.refused[prompt.index] = reason
            fraction, remedy = self.store.max_refused_fraction, retry_remedy(self.directory)
            check_refusals(self.refused, len(self.lengths), fraction, remedy)

        dispatcher = Dispatcher(
            endpoints,
            check=lambda endpoint, info: check_server(endpoint, info, self.expected, self.directory, longest),
            answered=answered,
            refused=refused,
            patience_seconds=patience_seconds,
        )
        room = _READ_AHEAD * sum(endpoint.concurrency for endpoint in endpoints)
        running = asyncio.create_task(dispatcher.run())
        feeding = asyncio.create_task(self._feed(dispatcher, room, bar))
        try:
            await asyncio.wait([running, feeding], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            feeding.result()
        finally:
            for task in (running, feeding):
                task.cancel()
            await asyncio.gather(running, feeding, return_exceptions=True)

    async def _feed(self, dispatcher: Dispatcher, room: int, bar: Progress) -> None:
        """Send prompts, and those that an engine lost again, until all samples are on disk."""
        looked = time.monotonic()
        while self.unsent or self.under_way or self.answered:
            while self.unsent and len(self.under_way) < room:
                self._send(dispatcher, room)
            await asyncio.sleep(_POLL_SECONDS if not self.unsent else _POLL_SECONDS / 10)
            bar.update(0)  # lines come also while no server answers
            if self.unsent or self.under_way or time.monotonic() - looked < _POLL_SECONDS:
                continue
            # Samples that were answered and are not on disk may have died with their engine.
            for link in dispatcher.links:
                await dispatcher.look(link)
            looked = time.monotonic()
            num_answered = len(self.answered)
            for record in self.shards.records():
                for sample_id in record.sample_ids:
                    self.answered.pop(sample_id, None)
            if len(self.answered) < num_answered:
                self.progressed, self.num_overdue = time.monotonic(), 0
            lost = [i for i, origin in self.answered.items() if dispatcher.is_lost(origin)]
            if time.monotonic() - self.progressed > _OVERDUE_SECONDS:
                lost = self._overdue()
            for sample_id in lost:
                del self.answered[sample_id]
            self.unsent += sorted(lost, key=lambda sample_id: self.lengths[sample_id])

    def _overdue(self) -> list[int]:
        """Return all samples that have been answered and are not on disk; raise UserError in the end."""
        self.num_overdue += 1
        if self.num_overdue > _MAX_OVERDUE:
            remedy = (
                f"The servers have answered {len(self.answered)} samples whose states do not appear there; "
                "look into the servers' logs."
            )
            raise UserError("output_dir", self.directory, remedy)
        return list(self.answered)

    def _send(self, dispatcher: Dispatcher, room: int) -> None:
        ids = [self.unsent.pop() for _ in range(min(room - len(self.under_way), len(self.unsent)))]
        for sample_id, (input_ids, loss_mask) in zip(ids, self.tokens.read(ids), strict=True):
            token_ids = input_ids.tolist()
            request = CaptureRequest.of(self.destination, str(sample_id), token_ids, loss_mask)
            dispatcher.add(Prompt(sample_id, str(sample_id), token_ids, request.to_params()))
            self.under_way.add(sample_id)
