"""The loop of a process that runs the target for a trainer, driven by JSON lines."""

import queue
import sys
from collections.abc import Callable, Sequence, Set
from typing import Any, Protocol

import torch
from torch import Tensor

from data.processes.child import Channel, Message
from data.transport.opening import open_transport
from data.transport.protocol import StateRequest, Transport
from eagle31.errors import UserError

_WINDOW = 256  # requests that a batch is chosen from


class TargetCapture(Protocol):
    """Runs the target, such as `HiddenStateCapture`."""

    def capture(self, batch: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]: ...


def serve(open_capture: Callable[[dict[str, Any]], TargetCapture]) -> None:
    """Answer requests until the parent ends, or no longer wants any.

    The settings have `transport`, `batch_tokens` and what `open_capture` reads. `begun` names the keys of a
    batch before it is computed, so that the parent knows with which samples a process died. The other answers
    are `done` or `refused` with a key. A `UserError` is reported before the process ends.

    Args:
        open_capture: loads the target. It may take its time.
    """
    # The states of a parent that has ended are of no use to anyone, not even those that are half computed.
    channel = Channel(exit_with_parent=True)
    settings = channel.settings
    try:
        capture, transport = open_capture(settings), open_transport(settings["transport"])
        channel.ready()
        pending: list[StateRequest] = []
        alone: set[str] = set()
        while True:
            _receive(channel.requests, pending, alone)
            batch = next_batch(pending, settings["batch_tokens"], alone)
            channel.answer({"begun": [request.key for request in batch]})
            for request, reason in _capture_batch(capture, transport, batch):
                if reason is None:
                    channel.answer({"done": request.key})
                else:
                    channel.answer({"refused": request.key, "reason": reason})
    except UserError as error:
        channel.fail([error.field, str(error.value), error.remedy])
        sys.exit(1)


def next_batch(
    pending: list[StateRequest], batch_tokens: int, alone: Set[str] = frozenset()
) -> list[StateRequest]:
    """Take the oldest request and those closest to it in length, with padding at most `batch_tokens` tokens.

    The batch is never empty, and the oldest request is always in it: the trainer waits for that one first.

    Args:
        alone: the keys of requests that get a batch without others.
    """
    if pending[0].key in alone:
        return [pending.pop(0)]
    oldest = len(pending[0].input_ids)
    batch: list[StateRequest] = []
    longest = 0
    window = [request for request in pending[:_WINDOW] if request.key not in alone]
    for request in sorted(window, key=lambda request: abs(len(request.input_ids) - oldest)):
        longest = max(longest, len(request.input_ids))
        if batch and longest * (len(batch) + 1) > batch_tokens:
            break
        batch.append(request)
    chosen = {request.key for request in batch}
    pending[:] = [request for request in pending if request.key not in chosen]
    return batch


def request_to_json(request: StateRequest, alone: bool = False) -> Message:
    """Return the message that asks a worker for a sample.

    Args:
        alone: compute it without others, because a process has died with it.
    """
    mask = request.loss_mask.int().tolist()
    message = {"key": request.key, "input_ids": request.input_ids.tolist(), "loss_mask": mask}
    return message | ({"alone": True} if alone else {})


def _request_from_json(content: Message) -> StateRequest:
    ids = torch.tensor(content["input_ids"], dtype=torch.int64)
    mask = torch.tensor(content["loss_mask"], dtype=torch.bool)
    return StateRequest(content["key"], ids, mask)


def _capture_batch(
    capture: TargetCapture, transport: Transport, batch: list[StateRequest]
) -> list[tuple[StateRequest, str | None]]:
    """Put the states of a batch into the transport; halve a batch that exceeds the memory.

    Returns:
        Each request, with the reason where it is refused.
    """
    try:
        states = capture.capture([request.input_ids for request in batch])
    except torch.OutOfMemoryError as error:
        if len(batch) == 1:
            return [(batch[0], f"out of memory: {error}")]
        half = len(batch) // 2
        first = _capture_batch(capture, transport, batch[:half])
        return [*first, *_capture_batch(capture, transport, batch[half:])]
    for request, (aux, final) in zip(batch, states, strict=True):
        transport.put(request, aux, final)
    return [(request, None) for request in batch]


def _receive(
    requests: "queue.SimpleQueue[Message | None]", pending: list[StateRequest], alone: set[str]
) -> None:
    """Add the requests that have come to `pending`; wait for one where there is nothing to do."""
    while not pending or not requests.empty():
        content = requests.get()
        assert content is not None, "the process ends with its parent"
        pending.append(_request_from_json(content))
        if content.get("alone"):
            alone.add(content["key"])
