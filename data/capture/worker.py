"""The process that runs the target beside a trainer: JSON lines, requests on stdin and answers on stdout."""

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor

from data.transport.opening import open_transport
from data.transport.protocol import StateRequest, Transport
from eagle31.errors import UserError

_WINDOW = 256  # requests that a batch is chosen from
_WATCH_SECONDS = 1.0


class Capture(Protocol):
    """Whatever runs the target, such as `HiddenStateCapture`."""

    def capture(self, batch: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]: ...


def serve(open_capture: Callable[[dict[str, Any]], Capture]) -> None:
    """Answers requests until stdin or the parent, whose process id is the first argument, ends.

    The first line has `transport`, `batch_tokens` and what `open_capture` reads; every other is a request.
    Answers are `done` or `refused` with a key, or `failed` with a `UserError` before the process ends.

    Args:
        open_capture: takes its time: requests are read meanwhile, so that the parent never waits.
    """
    answers = _private_stdout()
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, lines), daemon=True).start()
    settings = json.loads(lines.get())
    try:
        capture, transport = open_capture(settings), open_transport(settings["transport"])
        pending: list[StateRequest] = []
        while True:
            _receive(lines, pending)
            batch = next_batch(pending, settings["batch_tokens"])
            for request, refusal in _answer(capture, transport, batch):
                _tell(answers, {"done": request.key} if refusal is None else _refused(request, refusal))
    except UserError as error:
        _tell(answers, {"failed": [error.field, str(error.value), error.remedy]})
        sys.exit(1)


def next_batch(pending: list[StateRequest], batch_tokens: int) -> list[StateRequest]:
    """Takes the oldest request and those most like it in length; with padding at most `batch_tokens` tokens.

    Never none, and never without the oldest: the trainer waits for it first.
    """
    oldest = len(pending[0].input_ids)
    batch: list[StateRequest] = []
    longest = 0
    for request in sorted(pending[:_WINDOW], key=lambda request: abs(len(request.input_ids) - oldest)):
        longest = max(longest, len(request.input_ids))
        if batch and longest * (len(batch) + 1) > batch_tokens:
            break
        batch.append(request)
    chosen = {request.key for request in batch}
    pending[:] = [request for request in pending if request.key not in chosen]
    return batch


def request_to_json(request: StateRequest) -> dict[str, Any]:
    """A line of stdin."""
    mask = request.loss_mask.int().tolist()
    return {"key": request.key, "input_ids": request.input_ids.tolist(), "loss_mask": mask}


def _answer(
    capture: Capture, transport: Transport, batch: list[StateRequest]
) -> list[tuple[StateRequest, str | None]]:
    """Puts a batch's states; what memory cannot hold half by half. Each request with why it is refused."""
    try:
        states = capture.capture([request.input_ids for request in batch])
    except torch.OutOfMemoryError as error:
        if len(batch) == 1:
            return [(batch[0], f"out of memory: {error}")]
        half = len(batch) // 2
        return [*_answer(capture, transport, batch[:half]), *_answer(capture, transport, batch[half:])]
    for request, (aux, last) in zip(batch, states, strict=True):
        transport.put(request, aux, last)
    return [(request, None) for request in batch]


def _receive(lines: queue.SimpleQueue[bytes], pending: list[StateRequest]) -> None:
    """Adds what has come; waits where there is nothing to do."""
    while not pending or not lines.empty():
        content = json.loads(lines.get())
        ids = torch.tensor(content["input_ids"], dtype=torch.int64)
        mask = torch.tensor(content["loss_mask"], dtype=torch.bool)
        pending.append(StateRequest(content["key"], ids, mask))


def _refused(request: StateRequest, reason: str) -> dict[str, Any]:
    return {"refused": request.key, "reason": reason}


def _read(stream: BinaryIO, lines: queue.SimpleQueue[bytes]) -> None:
    for line in stream:
        lines.put(line)
    # Whoever asked wants nothing any more: not even what is half done.
    os._exit(0)


def _end_with(parent: int) -> None:
    """Another process may have inherited the other end of stdin and keep it open."""
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os._exit(0)


def _private_stdout() -> BinaryIO:
    """Keeps the answers apart from what libraries print, which goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def _tell(answers: BinaryIO, content: dict[str, Any]) -> None:
    answers.write(json.dumps(content).encode() + b"\n")
    answers.flush()
