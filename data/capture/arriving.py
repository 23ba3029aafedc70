"""Hidden states that arrive from engines: requested ahead within a bound, and taken in order."""

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass
from itertools import chain, islice

import torch
from datasets import Dataset

from data.batches.loader import SourceStats
from data.capture.dispatch import Completions, Dispatcher, Prompt, Refused
from data.capture.tokens import TokenRows, dataset_lengths
from data.capture.transport.protocol import OpenTransport, StateRequest
from data.refusals import check_refusals
from data.samples import CapturedSample
from eagle31.errors import UserError

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
# An engine puts what it has answered within seconds, and the time that a slow disk takes for a sample of each
# rank. When the awaited sample takes longer after its answer, all that were answered and have not arrived are
# requested again, so often at most.
_ARRIVAL_SECONDS, _SLOW_BYTES, _MAX_REPEATS = 60.0, 1e8, 3
_TAKEN_KEPT = 64
_CHUNK_SAMPLES = 512


@dataclass
class _Expected:
    position: int  # in the announced order
    index: int  # in the dataset
    request: StateRequest
    num_bytes: int
    answer: Future[Completions] | None = None  # an engine's, once it was requested


class ArrivingStates:
    """A `HiddenStateSource` of samples that engines capture, each dropped once it is read.

    Requests for the samples that `expect` announced go out in order while their states, whose sizes are known
    to the byte, fit the bound, so that no engine can exceed it. What was answered and does not arrive, as
    when an engine has died, is requested again, and a sample that no engine can make counts as one without
    tokens.

    Where the run is to stop, it gives up: samples that have not arrived come without tokens.

    One thread uses this, except for `collect_stats` and `stop`. A key consists of `name`, a random name of
    this object and the position in the order, so that no sample of a killed run is mistaken for one of this
    run.

    Args:
        dataset: columns input_ids and loss_mask.
        opened: the way of the states from the engines.
        spool_gb: the bound, in 1e9 bytes, which `num_sharing` ranks share equally.
        name: letters, digits, - and _; the name of this trainer process in this run.
        checks_refused: whether too many refused samples are an error; a store checks its own.
        stopping: whether the run is to stop, asked while a sample is awaited.

    Raises:
        UserError: the longest sample exceeds the bound; from `get_many`: its samples together do, too many
            are refused, or what the engines answer does not arrive.
    """

    def __init__(
        self,
        dataset: Dataset,
        dispatcher: Dispatcher,
        opened: OpenTransport,
        *,
        spool_gb: float,
        num_sharing: int = 1,
        name: str,
        checks_refused: bool = True,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.lengths = dataset_lengths(dataset)
        self.limit_bytes = int(spool_gb * 1e9 / num_sharing)
        self._dispatcher, self._opened, self._transport = dispatcher, opened, opened.transport
        self._spool_gb, self._num_sharing = spool_gb, num_sharing
        self._checks_refused, self._stopping = checks_refused, stopping
        self.gave_up = False  # samples may lack that have not arrived
        self._name = f"{name}-{secrets.token_hex(4)}"
        self._tokens = TokenRows(dataset)
        self._num_announced = 0
        self._coming: deque[_Expected] = deque()
        self._requested: deque[_Expected] = deque()
        self._requested_bytes = 0
        self.refused: dict[int, str] = {}  # reasons by sample index
        self._taken: deque[str] = deque(maxlen=_TAKEN_KEPT)
        self._repeated_until = -1  # the last position that may be answered twice
        self._restarts_seen = 0
        self._starved_seconds = 0.0
        self._full_seconds = 0.0
        self._reported = (0.0, 0.0, 0)  # totals at the last `collect_stats`
        self._held_since: float | None = None  # when a request was last held back
        longest = max(range(len(self)), key=lambda index: self.lengths[index])
        [(_, mask)] = self._tokens.read([longest])
        self._check_bound(opened.sample_bytes(mask), f"The longest sample, of {len(mask):,} tokens, takes")

    def __len__(self) -> int:
        return len(self.lengths)

    def expect(self, indices: Sequence[int]) -> None:
        """Announce the next samples that `get_many` will be called for."""
        for index, (input_ids, loss_mask) in zip(indices, self._tokens.read(indices), strict=True):
            request = StateRequest(f"{self._name}-{self._num_announced}", input_ids, loss_mask)
            num_bytes = self._opened.sample_bytes(loss_mask)
            self._coming.append(_Expected(self._num_announced, index, request, num_bytes))
            self._num_announced += 1
        self._request_ahead()

    def get_many(self, indices: Sequence[int]) -> list[CapturedSample]:
        """Wait for the next samples that `expect` announced, and return them."""
        coming = islice(chain(self._requested, self._coming), len(indices))
        self._check_bound(sum(one.num_bytes for one in coming), "The samples of a step take")
        self._look_after_engines()
        return [self._take(index) for index in indices]

    def captured(self, indices: Sequence[int]) -> Generator[tuple[int, CapturedSample | str], None, None]:
        """Yield each of these samples, the longest first, with its states or the reason why it is refused."""
        order = sorted(indices, key=lambda index: -self.lengths[index])
        self.expect(order[:_CHUNK_SAMPLES])
        for place, index in enumerate(order):
            if place % _CHUNK_SAMPLES == 0:
                self.expect(order[place + _CHUNK_SAMPLES : place + 2 * _CHUNK_SAMPLES])
            [sample] = self.get_many([index])
            yield index, self.refused.get(index, sample)

    def collect_stats(self) -> SourceStats:
        """What has been since the last call."""
        requested = list(self._requested)  # a copy, as another thread changes it
        arrived = [one.num_bytes for one in requested if self._transport.arrived(one.request.key)]
        totals = (self._starved_seconds, self._full_seconds, self._dispatcher.num_failures)
        starved, full, restarts = (now - then for now, then in zip(totals, self._reported, strict=True))
        self._reported = totals
        return SourceStats(sum(arrived), starved, full, int(restarts))

    def stop(self) -> None:
        """Give up, also in a wait of another thread."""
        self.gave_up = True

    def _check_bound(self, needed: int, what: str) -> None:
        if needed > self.limit_bytes:
            gb = needed * self._num_sharing / 1e9
            remedy = f"{what} {gb:.3g} GB over all ranks of a node: give more than that."
            raise UserError("capture.spool_gb", self._spool_gb, remedy)

    def _request_ahead(self) -> None:
        """Send requests in order as long as they fit."""
        now = time.perf_counter()
        if self._held_since is not None and self._last_has_arrived():
            self._full_seconds += now - self._held_since
        self._held_since = None
        while self._coming:
            expected = self._coming[0]
            if self._requested_bytes + expected.num_bytes > self.limit_bytes:
                self._held_since = now
                return
            self._requested.append(self._coming.popleft())
            self._requested_bytes += expected.num_bytes
            if expected.index not in self.refused:
                self._request(expected)

    def _request(self, expected: _Expected) -> None:
        request, order = expected.request, (expected.position,)
        prompt = Prompt(order, request.key, request.input_ids.tolist(), self._opened.task(request))
        expected.answer = self._dispatcher.submit(prompt)

    def _last_has_arrived(self) -> bool:
        return not self._requested or self._transport.arrived(self._requested[-1].request.key)

    def _take(self, index: int) -> CapturedSample:
        self._request_ahead()
        assert self._requested, f"sample {index} was not announced"
        expected = self._requested[0]
        assert expected.index == index, f"sample {index} was read where {expected.index} was announced"
        sample = None if index in self.refused else self._transport.take(expected.request, timeout=0)
        if sample is None and index not in self.refused:
            started = time.perf_counter()
            sample = self._wait_for(expected)
            self._starved_seconds += time.perf_counter() - started
        self._requested.popleft()
        self._requested_bytes -= expected.num_bytes
        self._taken.append(expected.request.key)
        if expected.answer is not None:
            expected.answer.cancel()  # where it is sent again, nobody waits for it
        self._request_ahead()
        if sample is None:
            return self._without_tokens()
        aux = sample.aux_hidden_states
        assert (*aux.shape[1:], aux.dtype) == astuple(self._opened.shape), (
            "the engines' target is another one"
        )
        return sample

    def _wait_for(self, expected: _Expected) -> CapturedSample | None:
        """Wait for a sample; return None where it is refused, or given up."""
        since, num_repeats = time.monotonic(), 0
        limit = _ARRIVAL_SECONDS + expected.num_bytes * self._num_sharing / _SLOW_BYTES
        while not (self.gave_up or self._stopping()):
            sample = self._transport.take(expected.request, _POLL_SECONDS)
            if sample is not None:
                return sample
            self._look_after_engines()
            assert expected.answer is not None
            if not expected.answer.done():
                since = time.monotonic()
                continue
            try:
                expected.answer.result()
            except Refused as error:
                self._refuse(expected.index, str(error))
                return None
            if time.monotonic() - since > limit:
                since = time.monotonic()
                num_repeats += 1
                if num_repeats > _MAX_REPEATS:
                    remedy = (
                        f"It was captured {num_repeats} times and did not arrive; look into the engines' "
                        "logs. Finished work is kept."
                    )
                    raise UserError("capture", f"sample {expected.index}", remedy)
                self._repeat()
        self.gave_up = True
        return None

    def _repeat(self) -> None:
        """Request what was answered and has not arrived again."""
        for one in self._requested:
            is_answered = one.answer is not None and one.answer.done() and one.answer.exception() is None
            if is_answered and not self._transport.arrived(one.request.key):
                self._request(one)
        # What was delivered before it was requested again comes twice.
        self._repeated_until = self._requested[-1].position if self._requested else -1

    def _look_after_engines(self) -> None:
        if self._dispatcher.num_failures > self._restarts_seen:
            self._restarts_seen = self._dispatcher.num_failures
            logger.warning("an engine of hidden states went down (%d)", self._restarts_seen)
            self._repeat()
        if self._requested and self._requested[0].position <= self._repeated_until:
            # Samples that were taken just before may come a second time, for nobody.
            for key in self._taken:
                self._transport.discard(key)

    def _refuse(self, index: int, reason: str) -> None:
        self.refused[index] = reason
        logger.warning("sample %d is left out: %s", index, reason)
        if self._checks_refused:
            check_refusals(self.refused, len(self))

    def _without_tokens(self) -> CapturedSample:
        shape, ids = self._opened.shape, torch.empty(0, dtype=torch.int64)
        aux = torch.empty(0, shape.num_aux_layers, shape.hidden_size, dtype=shape.dtype)
        return CapturedSample(ids, ids.bool(), aux, aux.new_empty(0, shape.hidden_size))
